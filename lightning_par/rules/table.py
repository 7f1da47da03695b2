"""Looking up the rule of a torch function, and gathering where there is none."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_par import comm
from lightning_par.comm import Axis
from lightning_par.positions import Positions
from lightning_par.view import ShardedTensor, full

log = logging.getLogger(__name__)

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
_resolved: dict[Any, Rule | None] = {}

gathers: Counter[tuple[str, str]] = Counter()
"""How often a function without a rule gathered its arguments, by (function, file:line)."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the torch functions and methods of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` by its rule, or on gathered arguments."""
    try:
        found = _resolved[func]
    except KeyError:
        found = _resolved[func] = _resolve(func)
    if found is not None:
        result = found(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return _gathered(func, args, kwargs)


def _resolve(func: Any) -> Rule | None:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _attribute(getattr(func.__self__, "__name__", ""))
    module = getattr(func, "__module__", None) or ""
    # torch.fft, torch.special and the like reuse names for other functions.
    if module.startswith(("torch.fft", "torch.special")):
        return None
    return RULES.get(name)


def _attribute(name: str) -> Rule:
    if name in ("T", "mT", "H", "mH"):
        return lambda func, x: x.t() if name in ("T", "H") and x.ndim == 2 else x.transpose(-2, -1)
    if name in ("real", "imag", "_base"):
        return lambda func, x: getattr(x._local, name) if name == "_base" else NotImplemented
    return _metadata


@rule("dim", "size", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "is_signed", "element_size",
      "is_contiguous", "stride", "storage_offset", "get_device", "__len__", "is_same_size", "__hash__", "is_tensor",
      "result_type", "is_nonzero_size", "is_inference", "is_conj", "is_neg", "names", "has_names")  # fmt: skip
def _metadata(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def on_gather(func: Any, views: list[ShardedTensor]) -> None:
    """Count and report a function that gathers, once by name and line."""
    name = getattr(func, "__name__", str(func))
    place = user_line()
    gathers[name, place] += 1
    if gathers[name, place] == 1 and views[0].axis.rank == 0:
        log.info("`%s` has no local rule and gathers a sharded tensor %s at %s", name, tuple(views[0].shape), place)


def user_line() -> str:
    """``file:line`` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "lightning_par.")) and module not in ("torch", "lightning_par"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    views: list[ShardedTensor] = []
    tree_map(lambda t: views.append(t) if isinstance(t, ShardedTensor) else None, (args, kwargs))
    for view in views:
        view.axis.about_to_gather(func, view)
    on_gather(func, views)
    name = getattr(func, "__name__", "")
    target = args[0] if args and _writes(name) and isinstance(args[0], ShardedTensor) else None
    if target is not None and target._local._base is not None:
        raise RuntimeError(
            f"`{name}` at {user_line()} writes in place through a view of a sharded tensor, and has no local rule, so the "
            "write would be lost. Write `y = y.clone()` before it, or use the function that returns a new tensor."
        )
    whole_args, whole_kwargs = tree_map(lambda t: full(t) if isinstance(t, Tensor) else t, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    if target is None:
        return result
    written = target.part_of(whole_args[0])
    if target._local.is_leaf and target._local.requires_grad:
        with torch.no_grad():
            target._local.copy_(written)
    else:
        target._local = written
    return target


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


_IN_PLACE_DUNDERS = {f"__i{op}__" for op in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or")}


# What rules are written with.


def view(local: Tensor, dim: int, positions: Positions, axis: Axis) -> ShardedTensor:
    return ShardedTensor(local, dim % local.ndim, positions, axis)


def enter(x: Any, axis: Axis) -> Any:
    """A plain argument of a function that runs on local tensors: its gradient is summed over the axis."""
    return axis.entered(x) if isinstance(x, Tensor) else x


def aligned(x: Tensor, dim: int, positions: Positions, axis: Axis) -> Tensor | None:
    """This rank's part of ``x`` cut along ``dim`` (negative) as ``positions`` say, or all of it where it broadcasts.

    None where ``x`` is sharded otherwise.
    """
    if isinstance(x, ShardedTensor):
        same = x._dim - x.ndim == dim and x._axis is axis and x._positions.agree(positions)
        return x._local if same else None
    if x.ndim >= -dim and x.shape[dim] == positions.size and positions.size > 1:
        return comm.scatter(x, dim % x.ndim, positions, axis)
    return enter(x, axis)
