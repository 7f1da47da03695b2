"""Gradients clipped as one device would clip them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.sharded.tensor import ShardedTensor, leaf


class Counting(Protocol):
    """Says which parameters count on this rank, so that each counts once along ``axis``."""

    axis: Axis

    def counts(self, parameter: Tensor) -> bool: ...


@torch.no_grad()
def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, once: Counting | None = None
) -> Tensor:
    """Scale the gradients so that their joint norm is at most ``max_norm``; returns the norm before, a 0-dim tensor.

    As ``torch.nn.utils.clip_grad_norm_``. A sharded parameter's parts count together, in one all-reduce (purpose
    ``"clip"``) along its axis, which all ranks must take part in; a replicated one counts once.

    Args:
        parameters: those of an optimizer.
        max_norm: the limit.
        norm_type: the p of the p-norm; may be infinite.
        once: where parameters are spread over stages, which ones count here; one more all-reduce joins the stages.
    """
    parameters = list(parameters)
    counted = parameters if once is None else [p for p in parameters if once.counts(p)]
    axes = {p.axis.ranks: p.axis for p in counted if isinstance(p, ShardedTensor) and p.axis.size > 1}
    whole = [p for p in counted if _ranks(p) not in axes]
    norms = [_norm(whole, norm_type)] if whole or not axes else []  # that of nothing is a number of the host's
    for ranks, axis in axes.items():
        part = _norm([p for p in counted if _ranks(p) == ranks], norm_type)
        norms.append(_join(part, norm_type, axis))
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[-1].device) for norm in norms]), norm_type)
    leaves = [leaf(p) for p in parameters]
    if once is not None and once.axis.size > 1:
        device = leaves[0].device if leaves else total.device  # that of messages, where nothing counts here
        total = _join(total.to(device, torch.float64), norm_type, once.axis)  # stages may differ in dtype
    held = _held(leaves)
    if held:
        nn.utils.clip_grads_with_norm_(held, max_norm, total)  # type: ignore[arg-type]
    return total


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every entry of the gradients to [-limit, limit]."""
    held = _held(map(leaf, parameters))
    if held:  # torch raises on an empty list
        nn.utils.clip_grad_value_(held, limit)  # type: ignore[arg-type]


@dataclass
class _Held:
    """Stands for a parameter where torch reads nothing but this rank's gradient of it."""

    grad: Tensor


def _held(leaves: Iterable[Tensor]) -> list[_Held]:
    return [_Held(grad) for grad in [x.grad for x in leaves] if grad is not None]


def _ranks(parameter: Tensor) -> tuple[int, ...]:
    """The ranks that hold the parts of ``parameter``; none where it is whole."""
    return parameter.axis.ranks if isinstance(parameter, ShardedTensor) else ()


def _norm(parameters: list[Tensor], norm_type: float) -> Tensor:
    """The joint norm of this rank's gradients, in float32 at least."""
    leaves = [leaf(p) for p in parameters]
    grads = [x.grad for x in leaves if x.grad is not None]
    if not grads:
        return torch.zeros((), device=leaves[0].device if leaves else None)
    norm = nn.utils.get_total_norm(grads, norm_type)
    return norm.to(torch.promote_types(norm.dtype, torch.float32))


def _join(part: Tensor, norm_type: float, axis: Axis) -> Tensor:
    if norm_type == float("inf"):
        return axis.all_reduce_(part.clone(), "clip", "max")
    return axis.all_reduce_(part**norm_type, "clip") ** (1 / norm_type)  # p-th powers add up, norms don't
