"""Nested containers of tensors, which torch walks in a module without a public name.

Public functions that walk one, such as `torch.func.functional_call`, call it themselves; there is none that only walks.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["APPLIERS", "SUPPORTED_NODES", "leaves_given", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

APPLIERS = ("torch.utils._pytree", "torch.utils._contextlib")
"""Modules of torch that call a function which they are given, as `tree_map` and ``torch.no_grad()(function)`` do."""


def leaves_given(args: Any, kwargs: Any) -> list[Any]:
    """As ``tree_leaves((args, kwargs))``, which takes a while to see that nothing is nested."""
    given = [*args, *kwargs.values()]
    nests = any(map(isinstance, given, repeat(tuple))) or not SUPPORTED_NODES.keys().isdisjoint(map(type, given))
    return tree_leaves((args, kwargs)) if nests else given
