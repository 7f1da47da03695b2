"""Functions that work on each element by itself, broadcasting their arguments."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from lightning_par.rules.table import _writes, aligned, rule, view
from lightning_par.view import ShardedTensor

_BINARY = "add sub mul div truediv floordiv floor_divide mod pow remainder fmod eq ne lt le gt ge and or xor"
_DUNDERS = [f"__{prefix}{op}__" for op in _BINARY.split() for prefix in ("", "r", "i")]
_PLAIN = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos
atan atan2 sinh cosh tanh sigmoid erf erfc floor ceil round trunc frac sign sgn clamp clamp_min clamp_max clip where
masked_fill add sub subtract mul multiply div divide true_divide floor_divide pow float_power remainder fmod maximum
minimum fmax fmin lerp addcmul addcdiv eq ne lt le gt ge not_equal greater less logical_and logical_or logical_not
logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite isclose nan_to_num hypot logit xlogy
relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardsigmoid hardswish logsigmoid threshold
tanhshrink hardshrink softshrink rrelu heaviside copysign
clone detach contiguous float double half bfloat16 int long bool cpu cuda zeros_like ones_like empty_like full_like
zero fill
""".split()
_IN_PLACE = [name + "_" for name in _PLAIN if name not in ("clone", "contiguous", "cpu", "cuda")]


@rule(*_PLAIN, *_IN_PLACE, *_DUNDERS, "__neg__", "__pos__", "__abs__", "__invert__", "__rpow__", "rsub", "__ror__",
      "__rand__")  # fmt: skip
def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run on local parts; a plain operand that has the sharded dim is cut, one that broadcasts over it is entered."""
    if "out" in kwargs:
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
    in_place = _writes(getattr(func, "__name__", ""))
    if in_place and not (isinstance(args[0], ShardedTensor) and args[0].ndim == lead.ndim):
        return NotImplemented
    result = func(*local_args, **kwargs)
    return args[0] if in_place else view(result, dim, lead._positions, lead._axis)


def _lead(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The sharded argument of most dims: the others are cut as it is."""
    views = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, ShardedTensor)]
    return max(views, key=lambda x: x.ndim)


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


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def new(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """These read only the dtype and device of ``x``."""
    return func(x._local, *args, **kwargs) if isinstance(x, ShardedTensor) else NotImplemented


@rule("copy_")
def copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(x, ShardedTensor) or source.shape != x.shape:
        return NotImplemented
    x._local.copy_(x.part_of(source), non_blocking)
    return x


@rule("requires_grad_")
def requires_grad_(func: Any, x: ShardedTensor, requires_grad: bool = True) -> Any:
    return x.requires_grad_(requires_grad)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
      "kl_div", "poisson_nll_loss", "soft_margin_loss")  # fmt: skip
def elementwise_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The loss of each element, reduced as it says, where both arguments have the same shape."""
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return NotImplemented
    bound.apply_defaults()
    given = bound.arguments
    reduction = given.get("reduction", "mean")
    shapes = {tuple(t.shape) for t in given.values() if isinstance(t, Tensor)}
    if len(shapes) > 1 or given.get("reduce") is not None or given.get("size_average") is not None:
        return NotImplemented
    tensors = [name for name, t in given.items() if isinstance(t, Tensor)]
    options = {k: v for k, v in given.items() if k not in (*tensors, "reduce", "size_average", "reduction")}
    each = pointwise(func, *(given[name] for name in tensors), **options, reduction="none")
    if each is NotImplemented or reduction == "none":
        return each
    if reduction == "batchmean":
        return each.sum() / each.shape[0]
    return each.mean() if reduction == "mean" else each.sum()


@rule("_foreach_norm")
def foreach_norm(func: Any, tensors: Any, ord: float = 2, dtype: Any = None) -> Any:
    import torch

    return tuple(torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors)


@rule("_foreach_mul_", "_foreach_div_", "_foreach_add_", "_foreach_sub_", "_foreach_lerp_", "_foreach_copy_",
      "_foreach_zero_", "_foreach_mul", "_foreach_div", "_foreach_add", "_foreach_sub", "_foreach_lerp",
      "_foreach_neg", "_foreach_sqrt", "_foreach_abs")  # fmt: skip
def foreach(func: Any, tensors: Any, *others: Any, **kwargs: Any) -> Any:
    """Lists of tensors, element by element of the list; sharded alike or cut to be."""
    local_others = []
    for other in others:
        if isinstance(other, (list, tuple)) and other and isinstance(other[0], Tensor):
            if any(isinstance(o, ShardedTensor) and not isinstance(t, ShardedTensor) for t, o in zip(tensors, other)):
                return NotImplemented
            other = [t.part_of(o) if isinstance(t, ShardedTensor) and o.ndim else o for t, o in zip(tensors, other)]
        local_others.append(other)
    local = [t._local if isinstance(t, ShardedTensor) else t for t in tensors]
    result = func(local, *local_others, **kwargs)
    if result is None or func.__name__.endswith("_"):
        return result
    return tuple(t.with_local(r) if isinstance(t, ShardedTensor) else r for t, r in zip(tensors, result))


@rule("_amp_foreach_non_finite_check_and_unscale_")
def unscale(func: Any, tensors: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """An infinity in any rank's part counts on every rank."""
    axes = {t._axis for t in tensors if isinstance(t, ShardedTensor)}
    func([t._local if isinstance(t, ShardedTensor) else t for t in tensors], found_inf, inv_scale)
    for axis in axes:
        axis.all_reduce_(found_inf, "found_inf", "max")
