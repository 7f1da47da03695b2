"""What all replicas have of one value, along a new first dim, as ``self.all_gather`` hands it out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_par.mesh import like_tensors
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.like_tensors import refuse_unlike, told_of
from lightning_par.private.fake_tensors import FakeTensor

PURPOSE = "all_gather"


def of_all_replicas(x: Tensor, axis: Axis, sync_grads: bool) -> Tensor:
    """``x`` of each rank along ``axis``, in rank order; all of them must call it.

    torch's own, `torch.distributed.nn.functional.all_gather`, fails in a backward over gloo where the ranks are not all
    there are.

    Args:
        x: alike in shape on all ranks.
        axis: of the replicas.
        sync_grads: whether gradients go back to where each was gathered from, as sums over the ranks.

    Raises:
        ValueError: it is not alike on all ranks, all of which raise this.

    Example::

        z = of_all_replicas(z_BD, groups.data, sync_grads=True).flatten(0, 1)  # of all batches
    """
    if isinstance(x, FakeTensor) and not axis.dry:  # a trial is of one replica
        return of_like_replicas(x, axis.size, sync_grads)
    if has_torch_function_unary(x):  # in parts: a function with no rule of its own gets it whole
        return handle_torch_function(of_all_replicas, (x,), x, axis, sync_grads)  # type: ignore[no-any-return]
    return _OfAll.apply(x if sync_grads else x.detach(), axis)  # type: ignore[no-any-return]


def of_like_replicas(x: Tensor, copies: int, sync_grads: bool = True) -> Tensor:
    """`of_all_replicas` where so many ``copies`` are taken to have what this one has, as in a trial."""
    return torch.stack([x if sync_grads else x.detach()] * copies)


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        takes = [x.numel()] * axis.size
        refuse_unlike(told_of(x, takes), axis.ranks, lambda told: axis.all_gather_object(told, like_tensors.PURPOSE))
        found = axis.all_gather(x, PURPOSE)
        return found.copy_(x.expand_as(found)) if axis.dry else found  # of values, where the step has any

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.axis.reduce_scatter([*grad.unbind()], PURPOSE), None
