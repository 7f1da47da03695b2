"""Which functions write into their arguments."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from lightning_par.private.pytree import tree_leaves
from lightning_par.sharded.functions import WRITES_NO_ENTRY, writes
from lightning_par.trial.memo import Memo


def targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that ``func`` is told to write into: by its name, by ``out=``, by ``inplace=True``."""
    into = [kwargs.get("out")]
    name = getattr(func, "__name__", "")
    if (writes(name) and name not in WRITES_NO_ENTRY) or is_told_to(func, args, kwargs):
        into.append(args[0] if args else next(iter(kwargs.values()), None))
    return [] if all(x is None for x in into) else [x for x in tree_leaves(into) if isinstance(x, Tensor)]


def is_told_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function has a parameter ``inplace``, and it is true."""
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    if len(args) < 2:
        return False
    place = _inplace[func]
    return place is not None and len(args) > place and bool(args[place])


def place_of_inplace(func: Any) -> int | None:
    """Which argument of ``func`` is its ``inplace``; None where it has none."""
    try:
        return list(inspect.signature(func).parameters).index("inplace")
    except (TypeError, ValueError):  # a builtin function, or one that has none
        return None


_inplace = Memo(place_of_inplace)
