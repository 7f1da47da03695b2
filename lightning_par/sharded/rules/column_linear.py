"""A column-split linear whose weights' gradients hide the message of its input's.

Its node gives the input's gradient alone and hands its own on to a second node, of the weight and the bias, which runs
once the input's gradient has left for the other ranks (Megatron-LM's linear with asynchronous communication does this
within one node; apart, the gradients of layers that read one input still make one message).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh.chunked_tokens import Arrival
from lightning_par.mesh.listener import heard
from lightning_par.mesh.overlapped_entry import hidden_behind, hides

_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _WeightGradients(torch.autograd.Function):
    """Gives nothing, and is given the gradient of the layer's output."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, inputs: list[Tensor]
    ) -> Tensor:
        ctx.inputs, ctx.dtypes = inputs, (weight.dtype, None if bias is None else bias.dtype)
        return weight.new_zeros((), dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, rows = ctx.inputs.pop(), grad.shape[:-1].numel()  # a rank may have no features at all
        flat = grad.reshape(rows, grad.shape[-1])
        weight = bias = None
        if ctx.needs_input_grad[0]:
            weight = (flat.t() @ x.reshape(rows, x.shape[-1])).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            bias = flat.sum(0).to(ctx.dtypes[1])
        return weight, bias, None, None, None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Tensor | None, inputs: list[Tensor],
        arrival: Arrival | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.inputs = inputs
        run = partial(F.linear, x) if arrival is None else arrival.product
        return run(weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        hides = ctx.needs_input_grad[3]
        ctx.inputs[:] = [x] * hides  # for the weights' node: an edge from there would let the message wait for it
        return grad @ weight.to(grad.dtype), None, None, grad if hides else None, None, None


class _Lowered(torch.autograd.Function):
    """``x.to(dtype)`` of what is under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, arrival: Arrival) -> Tensor:
        ctx.dtype = x.dtype
        low = torch.empty_like(x, dtype=dtype)
        arrival.low = low.detach()
        return low

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `column_linear` may run a linear of these plain tensors, alike on all ranks."""
    return weight.requires_grad and torch.is_grad_enabled() and are_alike(x, weight, bias) and hides(x)


def are_alike(x: Tensor, weight: Tensor, bias: Tensor | None, kinds: tuple[type, ...] = _PLAIN) -> bool:
    """Whether they are plain, or of ``kinds``, and ``F.linear`` needs no casts of them but autocast's."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if not all(type(each) in kinds for each in tensors):
        return False
    lowered = torch.is_autocast_enabled(x.device.type)
    return all(each.dtype in _FLOATS for each in tensors) if lowered else all(each.dtype == x.dtype for each in tensors)


@heard
def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of an entry ``x``, and the parts of weight and bias of this rank."""
    if not fits(x, weight, bias):  # any more, where it is called again without its rule
        return F.linear(x, weight, bias)
    return _linear(x, x.to(multiplied(x)), weight, bias)


def arriving_linear(x: Tensor, weight: Tensor, bias: Tensor | None, arrival: Arrival) -> Tensor:
    """``F.linear`` of an entry ``x`` that is under way, in chunks as they come."""
    dtype = multiplied(x)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return arrival.product(weight.to(dtype), None if bias is None else bias.to(dtype))
    low = x if x.dtype == dtype else _Lowered.apply(x, dtype, arrival)
    return _linear(x, low, weight, bias, arrival)


def multiplied(x: Tensor) -> torch.dtype:
    """In which precision autocast, if it is on, multiplies ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _linear(entry: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, arrival: Arrival | None = None) -> Tensor:
    """``F.linear`` of ``x``, which is ``entry`` in the precision of the product."""
    inputs: list[Tensor] = []
    gradients = None
    if weight.requires_grad or bias is not None and bias.requires_grad:
        gradients = _WeightGradients.apply(weight, bias, (*x.shape[:-1], weight.shape[0]), x.dtype, inputs)
        hidden_behind(gradients, entry)
    made: Tensor = _ColumnLinear.apply(x, weight, bias, gradients, inputs, arrival)
    return made
