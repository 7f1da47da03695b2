"""Linear layers at the ends of an island whose tokens come, or leave, in chunks: which are, and a row-split one.

The first layer that reads an entry multiplies the tokens that have come while others are under way; those that read it
too find all of them. A row-split layer lets the sums of some tokens leave while it multiplies others, and backward
multiplies their gradients as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.chunked_tokens import Arrival, product_summed
from lightning_par.mesh.chunks import SPEEDS, Chunks, chunks_of
from lightning_par.mesh.collectives import gather
from lightning_par.mesh.listener import thread
from lightning_par.mesh.overlapped_entry import pays
from lightning_par.mesh.positions import Positions
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.sharded.rules.column_linear import are_alike, multiplied
from lightning_par.sharded.tensor import ShardedTensor

_KINDS = (Tensor, torch.nn.Parameter, FakeTensor)  # a dry run's messages are those of the run


def entry_chunks(func: Any, args: Sequence[Any], kwargs: dict[str, Any], residual: Any) -> Chunks | None:
    """In which chunks the tokens along ``residual`` that ``func`` is given come; None where they come whole."""
    if func is not F.linear or kwargs or not 2 <= len(args) <= 3:
        return None
    x, weight, bias = (*args, None)[:3]
    if type(x) is not ShardedTensor or x._axis is not residual or x._local.device.type not in SPEEDS:
        return None
    if not isinstance(weight, ShardedTensor) or weight._axis.residual is not residual or weight._dim != 0:
        return None
    if bias is not None and not (isinstance(bias, ShardedTensor) and bias._positions.agree(weight._positions)):
        return None
    local, w, b = x._local, weight._local, None if bias is None else bias._local
    if (
        w.ndim != 2
        or x.shape[-1] != w.shape[1]
        or not are_alike(local, w, b, _KINDS)
        or not _may(local, x.numel(), residual)
    ):
        return None
    trained = w.requires_grad or b is not None and b.requires_grad
    if trained and torch.is_grad_enabled() and not local.requires_grad:  # what is first, as data
        return None
    made = weight._positions.size // residual.size  # alike on all ranks, which a part's features need not be
    sizes = local.element_size(), multiplied(local).itemsize
    return chunks_of(x.shape, made, sizes, x._dim, x._positions, residual.size, local.device.type)


def _may(x: Tensor, numel: int, residual: Axis) -> bool:
    """Whether what is to move of ``x``, or its gradient, may do so in chunks."""
    if thread.listener is not None or torch.compiler.is_compiling():
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) or pays(x, numel, residual)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: Chunks, axis: Axis, purpose: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = chunks, axis, purpose
        return product_summed(x, weight, chunks, axis, purpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x, weight), (chunks, axis, purpose) = ctx.saved_tensors, ctx.args
        inputs = weights = None
        if torch.is_grad_enabled():  # gradients get a graph of their own
            whole = gather(grad, chunks.dim, chunks.positions, axis, purpose)
            inputs = whole @ weight
        else:
            arrival = Arrival(grad, chunks, axis, purpose)
            inputs = arrival.product(weight.t()) if ctx.needs_input_grad[0] else None
            whole = arrival.finish()
        if ctx.needs_input_grad[1]:
            weights = whole.flatten(0, 1).t() @ x.flatten(0, 1)
        return inputs, weights, None, None, None


def row_linear(operands: Sequence[Tensor], features: Positions, axis: Axis) -> Any:
    """The sum over the ranks of ``F.linear`` of plain ``operands``, this rank's ``features`` and the weight's columns.

    Returns:
        Sharded by tokens; `NotImplemented` where they don't leave in chunks.
    """
    x, weight = operands
    residual = axis.residual
    if residual is None or x.device.type not in SPEEDS or x.ndim != 3 or not are_alike(x, weight, None, _KINDS):
        return NotImplemented
    shape = (*x.shape[:-1], weight.shape[0])
    tokens: tuple[int, Positions] | None = residual.tokens_of(shape)
    grows = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if tokens is None or not _may(x, x.shape[0] * x.shape[1] * shape[-1], residual):
        return NotImplemented
    if grows and not residual.hides_entries:
        return NotImplemented
    dtype, made = multiplied(x), features.size // residual.size
    chunks = chunks_of(shape, made, (dtype.itemsize, dtype.itemsize), *tokens, residual.size, x.device.type)
    if chunks is None:
        return NotImplemented
    x, weight = x.to(dtype), weight.to(dtype)
    run = _RowLinear.apply if grows else product_summed
    return ShardedTensor(run(x, weight, chunks, residual, "leave"), *tokens, residual)
