"""Nested containers of tensors, which torch walks in a module without a public name.

Public functions that walk one, such as `torch.func.functional_call`, call it themselves; there is none that only walks.
"""

from __future__ import annotations

from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["SUPPORTED_NODES", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
