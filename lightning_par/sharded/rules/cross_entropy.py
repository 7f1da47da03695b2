"""Classification losses whose classes or rows are sharded: the logits are never gathered.

The vocabulary-parallel cross-entropy is Megatron-LM's (arXiv 1909.08053, section 3): three all-reduces of one scalar a
row, for the largest logit, the sum of exponentials and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.functions import assert_async
from lightning_par.sharded.no_backward import differentiable_once
from lightning_par.sharded.rules.gather_scatter import gather_beside
from lightning_par.sharded.rules.lookup import is_same, moves, rule, view
from lightning_par.sharded.rules.reduce import accumulated_in, kernel_dtype, peak
from lightning_par.sharded.tensor import ShardedTensor, full


def _own_classes(target: Tensor, x: ShardedTensor) -> tuple[Tensor, Tensor]:
    """Where each target class lies in this rank's part, clamped, and which lie elsewhere."""
    positions: Positions = x._positions
    own = positions.indices(x._axis.rank)
    assert_async(((target >= 0) & (target < positions.size)).all(), "a class is out of range")
    if len(own) and own[-1] - own[0] + 1 == len(own):
        place = target - int(own[0])
        elsewhere = (place < 0) | (place >= len(own))
    else:
        place = positions.local_index(x._axis.rank, target.device)[target]
        elsewhere = place < 0
    return place.masked_fill(elsewhere, 0), elsewhere


def _picked(local: Tensor, place: Tensor, elsewhere: Tensor, dim: int) -> Tensor:
    if local.shape[dim] == 0:
        return local.new_zeros(place.shape) + local.sum()
    return local.gather(dim, place).masked_fill(elsewhere, 0)


class _Shape(torch.autograd.Function):
    """Nothing of the shape of ``x``: the gradient that comes to it is that of ``x``, whose values it does not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # else none would be zeros, as many as there are logits
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(x)[target], each row; the classes are dim 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Tensor, top: Tensor, axis: Axis, place: Tensor, elsewhere: Tensor
    ) -> Tensor:
        shifted = x.detach() - top
        target_logit = axis.all_reduce_(_picked(shifted, place, elsewhere, 1).contiguous(), "loss")
        softmax = shifted.exp_()
        total = axis.all_reduce_(softmax.sum(1, keepdim=True), "loss")
        ctx.save_for_backward(softmax.div_(total), place, elsewhere, shape)
        ctx.axis = axis
        return (total.log() - target_logit).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, place, elsewhere, shape = ctx.saved_tensors
        grad = collectives.left(grad, ctx.axis, "loss").unsqueeze(1)
        x_grad = _Gradient.apply(shape, grad, softmax, ctx.axis, place, elsewhere)
        return x_grad, None, None, None, None, None


class _Gradient(torch.autograd.Function):
    """(softmax(x) - onehot(target)) grad, each row, which has a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, shape: Tensor, grad: Tensor, softmax: Tensor, axis: Axis, place: Tensor, elsewhere: Tensor
    ) -> Tensor:
        ctx.save_for_backward(softmax, grad, place, elsewhere)
        ctx.axis = axis
        x_grad = softmax * grad
        if softmax.shape[1]:
            x_grad.scatter_add_(1, place, (-grad).expand(place.shape).masked_fill(elsewhere, 0))
        return x_grad

    @staticmethod
    @differentiable_once("A penalty on gradients of a loss over split classes")
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        softmax, grad, place, elsewhere = ctx.saved_tensors
        own = (v * softmax).sum(1, keepdim=True)
        mean = ctx.axis.all_reduce_(own.clone(), "loss")
        return softmax * (v - mean) * grad, own - _picked(v, place, elsewhere, 1), None, None, None, None


@rule("cross_entropy")
def cross_entropy(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """As `torch.nn.functional.cross_entropy`, ``input`` (N, C, ...) sharded along its classes C."""
    class_dim = 1 if input.ndim > 1 else 0
    if not isinstance(input, ShardedTensor) or size_average is not None or reduce is not None:
        return NotImplemented
    if input._dim != class_dim:
        return _by_rows(func, input, target, weight, ignore_index, reduction, label_smoothing=label_smoothing)
    if target.is_floating_point():
        if weight is not None or ignore_index != -100 and ignore_index >= 0:
            return NotImplemented
        return _with_probabilities(input, target, reduction, label_smoothing)
    if weight is not None and label_smoothing:
        return NotImplemented
    target = full(target)
    dtype = _loss_dtype(input)
    # As autocast and torch's kernel do: the sum over classes is accumulated in float32 at least.
    x: Any = input.to(accumulated_in(input.dtype))
    if input.ndim == 1:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    valid = target != ignore_index
    place, elsewhere = _own_classes(target.masked_fill(~valid, 0).unsqueeze(1), x)
    nll = _CrossEntropy.apply(x._local, _Shape.apply(x._local), peak(x, [1]), x._axis, place, elsewhere)
    if label_smoothing:
        # -mean(log softmax) = logsumexp - mean(x), and nll = logsumexp - x[target].
        picked = collectives.leave(_picked(x._local, place, elsewhere, 1).squeeze(1), x._axis, "loss")
        nll = nll + label_smoothing * (picked - x.mean(1))
    out = _reduced(nll, target, valid, weight, reduction)
    if input.ndim == 1 and reduction == "none":
        out = out.squeeze(0)
    return out.to(dtype)


def _loss_dtype(x: Tensor) -> torch.dtype:
    return kernel_dtype(x, lambda like: F.cross_entropy(like, torch.zeros((), dtype=torch.int64, device=x.device)))


def _reduced(nll: Tensor, target: Tensor, valid: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    nll = nll.masked_fill(~valid, 0)
    counted = valid.to(nll.dtype)
    if weight is not None:
        counted = full(weight)[target.masked_fill(~valid, 0)].to(nll.dtype) * counted
        nll = nll * counted
    if reduction == "none":
        return nll
    return nll.sum() if reduction == "sum" else nll.sum() / counted.sum()


def _with_probabilities(x: Any, target: Tensor, reduction: str, smoothing: float) -> Tensor:
    class_dim, dtype = 1 if x.ndim > 1 else 0, _loss_dtype(x)
    x = x.to(accumulated_in(x.dtype))
    if smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[class_dim]
    each = -(torch.log_softmax(x, class_dim) * target).sum(class_dim)
    if reduction == "none":
        return each.to(dtype)
    return (each.sum() / (each.numel() if reduction == "mean" else 1)).to(dtype)


def _by_rows(
    func: Any, x: Any, target: Tensor, weight: Any, ignore_index: int, reduction: str, **options: Any
) -> Any:  # fmt: skip
    """Rows sharded, classes whole: each rank's rows, weighed by the count of all."""
    by_class = target.is_floating_point()
    dim = x._dim if x._dim == 0 or by_class else x._dim - 1
    part = _cut(target, dim, x)
    if weight is not None:
        options["weight"] = x._axis.entered(full(weight))
    options["ignore_index"] = ignore_index
    if reduction == "none":
        each = func(x._local, part, reduction="none", **options)
        return view(each, x._dim - (x._dim > 1), x._positions, x._axis)
    dtype, wide = _loss_dtype(x), accumulated_in(x.dtype)
    local, part = x._local.to(wide), part.to(wide) if by_class else part
    if weight is not None:
        weight, options["weight"] = full(weight).to(wide), options["weight"].to(wide)
    total = collectives.leave(func(local, part, reduction="sum", **options), x._axis, "loss")
    if reduction == "mean":
        total = total / (x.numel() // x.shape[1] if by_class else _counted(full(target), weight, ignore_index))
    return total.to(dtype)


def _counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by: the whole batch's classes, by their weights."""
    valid = target != ignore_index
    return valid.sum() if weight is None else (weight[target.masked_fill(~valid, 0)] * valid).sum()


def _cut(target: Tensor, dim: int, x: ShardedTensor) -> Tensor:
    if isinstance(target, ShardedTensor) and target._dim == dim and target._positions.agree(x._positions):
        return target._local
    return collectives.scatter(full(target), dim, x._positions, x._axis)


@rule("nll_loss")
def nll_loss(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if not isinstance(input, ShardedTensor) or input.ndim < 2 or size_average is not None or reduce is not None:
        return NotImplemented
    if input._dim != 1:
        return NotImplemented if not is_same(func, F.nll_loss) else _by_rows(
            func, input, target, weight, ignore_index, reduction
        )  # fmt: skip
    target = full(target)
    valid = target != ignore_index
    picked = torch.gather(input, 1, target.masked_fill(~valid, 0).unsqueeze(1)).squeeze(1)
    return _reduced(-picked, target, valid, weight, reduction)


@rule("gather", "take_along_dim")
def gather(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Picking along the sharded dim: each rank its own entries, and one all-reduce."""
    names = ("dim", "index") if func.__name__ == "gather" else ("indices", "dim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dim, index = given.get("dim"), given.get("index", given.get("indices"))
    if not isinstance(dim, int) or len(given) > 2 or index is None:
        return NotImplemented
    dim %= x.ndim
    if not isinstance(x, ShardedTensor) or dim != x._dim:
        return gather_beside(func, x, dim, index)
    if isinstance(index, ShardedTensor) and moves(index):
        return NotImplemented
    index = full(index)
    if func.__name__ == "take_along_dim" and any(index.shape[d] != x.shape[d] for d in range(x.ndim) if d != dim):
        return NotImplemented  # it broadcasts
    place, elsewhere = _own_classes(index, x)
    return collectives.leave(_picked(x._local, place, elsewhere, dim), x._axis, "loss")
