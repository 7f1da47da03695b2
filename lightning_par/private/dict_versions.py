"""How often a dict was written to."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from torch._C._dynamo.guards import dict_version

version_of_dict: Callable[[dict[Any, Any]], int] = dict_version
"""A number that is another one after each write to a dict, and is no other dict's.

Python counts writes for itself, and from 3.12 on tells who watches; `torch.compile` asks for the same number. To
compare it takes a tenth of what it takes to compare the entries.
"""


def dict_behind(proxy: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dict that `vars` of a class shows, which Python gives out by no other way; None where there is none."""
    found = [x for x in gc.get_referents(proxy) if type(x) is dict]
    return found[0] if len(found) == 1 else None
