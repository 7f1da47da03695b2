"""Losses of each row by itself, reduced over all rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.sharded.rules.lookup import is_same, rule, view
from lightning_par.sharded.rules.per_sample import Cores, by_rows
from lightning_par.sharded.rules.pointwise import pointwise
from lightning_par.sharded.rules.reduce import every_rank_has_some
from lightning_par.sharded.tensor import ShardedTensor

_LOSSES: dict[str, Cores] = {
    "cosine_embedding_loss": {"input1": 1, "input2": 1, "target": 0},
    "triplet_margin_loss": {"anchor": 1, "positive": 1, "negative": 1},
    "multi_margin_loss": {"input": 1, "target": 0},
    "multilabel_margin_loss": {"input": 1, "target": 1},
    "multilabel_soft_margin_loss": {"input": 1, "target": 1},
}


@rule(*_LOSSES)
def row_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return NotImplemented
    given = bound.arguments
    if given.get("reduce") is not None or given.get("size_average") is not None:
        return NotImplemented
    reduction = given.pop("reduction", "mean")
    each = by_rows(func, _LOSSES[func.__name__], (), {**given, "reduction": "none"})
    return each if each is NotImplemented else _reduced(each, reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


@rule("gaussian_nll_loss")
def gaussian_nll_loss(
    func: Any, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    if isinstance(var, Tensor) and var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)

    def run(input: Tensor, target: Tensor, var: Any) -> Tensor:
        return F.gaussian_nll_loss(input, target, var, full, eps, "none")

    each = pointwise(run, input, target, var)
    return each if each is NotImplemented else _reduced(each, reduction)


@rule("ctc_loss")
def ctc_loss(
    func: Any, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: Any = "mean", zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """``log_probs`` (T, N, C); a mean divides each sample's loss by its own length."""
    x = log_probs
    given = (targets, input_lengths, target_lengths)
    if not is_same(func, F.ctc_loss) or not isinstance(x, ShardedTensor) or x.ndim != 3 or x._dim != 1:
        return NotImplemented
    if any(isinstance(each, ShardedTensor) for each in given) or not every_rank_has_some(x):
        return NotImplemented
    positions, axis = x._positions, x._axis
    lengths = [torch.as_tensor(each) for each in (input_lengths, target_lengths)]
    if targets.ndim == 1:
        pieces = targets.split(lengths[1].tolist())
        own = torch.cat([pieces[i] for i in positions.indices(axis.rank)])
    else:
        own = collectives.scatter(targets, 0, positions, axis)
    inputs, outputs = (collectives.scatter(each, 0, positions, axis) for each in lengths)
    each = func(x._local, own, inputs, outputs, blank, "none", zero_infinity)
    if reduction == "mean":
        each = each / outputs.clamp_min(1).to(each)
    return _reduced(view(each, 0, positions, axis), reduction)
