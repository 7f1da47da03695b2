"""Functions that work on each element by itself, broadcasting their arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.sharded.functions import BY_ENTRY
from lightning_par.sharded.rules.lookup import aligned, is_same, moves, rule, view, writes
from lightning_par.sharded.tensor import ShardedTensor, full


@rule(*BY_ENTRY)
def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run on local parts; a plain operand that has the sharded dim is cut, one that broadcasts over it is entered."""
    if "out" in kwargs or (is_same(func, torch.where) and len(args) + len(kwargs) == 1):
        return NotImplemented
    lead = _lead(args, kwargs)
    dim = lead._dim - lead.ndim  # from the right, as broadcasting counts
    local_args = []
    for arg in args:
        if isinstance(arg, Tensor):
            arg = aligned(arg, dim, lead._positions, lead._axis)
            if arg is None:
                return NotImplemented
        local_args.append(arg)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            kwargs[name] = aligned(value, dim, lead._positions, lead._axis)
            if kwargs[name] is None:
                return NotImplemented
    in_place = writes(getattr(func, "__name__", ""))
    if in_place:
        if not (args and isinstance(args[0], ShardedTensor) and args[0].ndim == lead.ndim):
            return NotImplemented
    result = func(*local_args, **kwargs)
    if in_place:
        return args[0]
    if not isinstance(result, Tensor) and func in (Tensor.__eq__, Tensor.__ne__):  # `x == None`, which Python answers
        return func is Tensor.__ne__
    return view(result, dim, lead._positions, lead._axis)


def _lead(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The sharded argument of most dims: the others are cut as it is, best those that are whole here anyway."""
    views = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, ShardedTensor)]
    return max(views, key=lambda x: (moves(x), x.ndim))


@rule("prelu")
def prelu(func: Any, x: Tensor, weight: Tensor) -> Any:
    """There is one weight for all elements, or one for each index of dim 1 of ``x``."""
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    dim = x._dim - x.ndim
    each = weight.numel() > 1 and x.ndim > 1
    own = aligned(weight.view(-1, *[1] * (x.ndim - 2)) if each else weight, dim, x._positions, x._axis)
    return NotImplemented if own is None else view(func(x._local, own.view(-1)), dim, x._positions, x._axis)


@rule("to", "type")
def to(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    local_args = [arg._local if isinstance(arg, ShardedTensor) else arg for arg in args]
    if not isinstance(x, ShardedTensor):
        return func(x, *local_args, **kwargs)
    result = func(x._local, *local_args, **kwargs)
    return x if result is x._local else x.with_local(result) if isinstance(result, Tensor) else result


@rule("type_as")
def type_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.to(other.dtype)


@rule("new_tensor")
def new_tensor(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """This reads only the dtype and device of ``x``."""
    return func(x._local, *args, **kwargs) if isinstance(x, ShardedTensor) else NotImplemented


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def new(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Sharded as ``x`` where it has the sharded dim, too: it is there to be written into."""
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    count = 1 if args and isinstance(args[0], (tuple, list)) else len(args) - (func.__name__ == "new_full")
    given = args[0] if count == 1 and isinstance(args[0], (tuple, list)) else args[:count]
    size = list(given or kwargs.get("size", ()))
    if len(size) != x.ndim or size[x._dim] != x.shape[x._dim]:
        return func(x._local, *args, **kwargs)
    size[x._dim] = x._positions.count(x._axis.rank)
    kwargs.pop("size", None)
    return view(func(x._local, size, *args[count:], **kwargs), x._dim, x._positions, x._axis)


@rule("copy_")
def copy_(func: Any, x: Tensor, other: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(x, ShardedTensor) or other.shape != x.shape:
        return NotImplemented
    x._local.copy_(x.part_of(other), non_blocking)
    return x


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
      "kl_div", "poisson_nll_loss", "soft_margin_loss", "margin_ranking_loss", "hinge_embedding_loss")  # fmt: skip
def elementwise_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The loss of each element, reduced as it says."""
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return NotImplemented
    bound.apply_defaults()
    given = bound.arguments
    reduction = given.get("reduction", "mean")
    if given.get("reduce") is not None or given.get("size_average") is not None:
        return NotImplemented
    options = {k: v for k, v in given.items() if k not in ("reduce", "size_average", "reduction")}
    each = pointwise(func, **options, reduction="none")
    if each is NotImplemented or reduction == "none":
        return each
    if reduction == "batchmean":
        return each.sum() / given["input"].shape[0]
    if reduction == "mean" and is_same(func, F.mse_loss, F.l1_loss) and given.get("weight") is not None:
        return each.sum() / full(given["weight"]).sum()
    return each.mean() if reduction == "mean" else each.sum()
