"""Writes into sharded tensors, which must reach all that one device's would."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_par.rules.report import user_line
from lightning_par.view import ShardedTensor


def copied(x: Tensor) -> Tensor:
    """Mark a local tensor that is a copy where torch promises a view."""
    x._stands_for_view = True  # type: ignore[attr-defined]
    return x


def refuse_lost_write(func: Any, x: ShardedTensor) -> None:
    base = x._local if x._local._base is None else x._local._base
    if getattr(base, "_stands_for_view", False):
        raise RuntimeError(
            f"`{getattr(func, '__name__', func)}` at {user_line()} writes in place into a slice of a sharded tensor "
            "that had to be copied, so the write would be lost. Write `y = y.clone()` before it, or use the function "
            "that returns a new tensor."
        )


def writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


_IN_PLACE_DUNDERS = {
    f"__i{op}__" for op in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or")
}


def refuse_lost_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before ``func`` uses sharded tensors, of which there may be copies that were written to."""
    name = getattr(func, "__name__", str(func))
    for x in tree_leaves((args, kwargs)):
        if type(x) is ShardedTensor:
            x.refuse_lost_writes(name, args[2] if name == "__setitem__" else None)
