"""The operations that a `TorchDispatchMode` meets."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

schema_of = attrgetter("_schema")
"""What an operation takes, writes and returns; what is public tells the name alone."""

Operator = torch._ops.OpOverload
"""The class of one; what takes functions, as a loop that is traced does, is of another."""

HOMES = ("torch._ops", "torch.ops")
"""How the ``__module__`` of an operation begins, by which it is told from a function of torch."""


def written_arguments(operator: Any) -> list[tuple[int, str]]:
    """The arguments that an operation says it writes into, by place and name.

    Example::

        assert written_arguments(torch.ops.aten.add_.Tensor) == [(0, "self")]
    """
    arguments = enumerate(schema_of(operator).arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]
