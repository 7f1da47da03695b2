"""Losses of classes, with the classes or the rows sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case
from tests.rule_cases.data import integers, normal, unit

N, C, L = 6, 5, 3
logits, target, weight = normal(N, C), integers(C, N), unit(C)
deep, deep_target = normal(4, C, L), integers(C, 4, L)
ignored = target.clone()
ignored[[1, 4]] = -100
ignored_two = target.clone()
ignored_two[[0, 3]] = 2
probabilities = normal(N, C).softmax(1)
_rows = [(0, None), (0, 0)]


def _cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(x, target, weight if weight is None else weight.detach(), **options)


CASES = []
for _reduction in ("mean", "sum", "none"):
    for _smoothing in (0.0, 0.1):
        _call = partial(_cross_entropy, reduction=_reduction, label_smoothing=_smoothing)
        _label = f"{_reduction} smoothing={_smoothing}"
        CASES += [
            Case(f"cross_entropy {_label}", _call, [logits, target], [(1, None), *_rows]),
            Case(f"cross_entropy ignored {_label}", _call, [logits, ignored], [(1, None), (1, 0), *_rows]),
            Case(
                f"cross_entropy ignore_index=2 {_label}",
                partial(_call, ignore_index=2),
                [logits, ignored_two],
                [(1, None), *_rows],
            ),
            Case(
                f"cross_entropy weight {_label}",
                _call,
                [logits, ignored, weight],
                [(1, None, None), (1, None, 0), (0, 0, None)],
                local=None,
            ),
            Case(
                f"cross_entropy (N, C, d) {_label}", _call, [deep, deep_target], [(1, None), (0, 0), (2, 1), (2, None)]
            ),
            Case(
                f"cross_entropy (N, C, d) weight {_label}",
                _call,
                [deep, deep_target, weight],
                [(1, None, None), (2, 1, None)],
                local=None,
            ),
            Case(f"cross_entropy (C) {_label}", _call, [normal(C), torch.tensor(3)], [(0, None)]),
            Case(
                f"cross_entropy of probabilities {_label}",
                _call,
                [logits, probabilities],
                [(1, None), (1, 1), (0, 0)],
                local=None,
            ),
            Case(
                f"cross_entropy of probabilities, weight {_label}",
                _call,
                [logits, probabilities, weight],
                [(1, None, None)],
                local=None,
            ),
            Case(
                f"cross_entropy of probabilities (N, C, d) {_label}",
                _call,
                [deep, normal(4, C, L).softmax(1)],
                [(1, None), (2, None)],
                local=None,
            ),
        ]
    _nll = partial(F.nll_loss, reduction=_reduction)
    CASES += [
        Case(f"nll_loss {_reduction}", _nll, [logits, ignored], [(1, None), (1, 0)]),
        Case(f"nll_loss rows {_reduction}", _nll, [logits, ignored], _rows, local=None),
        Case(
            f"nll_loss weight {_reduction}",
            lambda x, t, w, f=_nll: f(x, t, w.detach()),
            [logits, ignored, weight],
            [(1, None, None)],
        ),
        Case(f"nll_loss (N, C, d) {_reduction}", _nll, [deep, deep_target], [(1, None), (2, None)], local=None),
        Case(f"nll_loss (C) {_reduction}", _nll, [normal(C), torch.tensor(3)], [(0, None)], local=None),
    ]
CASES += [
    Case("cross_entropy default", F.cross_entropy, [logits, target], [(1, None), *_rows]),
    Case(
        "cross_entropy by keyword",
        lambda x, t: F.cross_entropy(input=x, target=t, ignore_index=-1),
        [logits, target],
        [(1, None), (0, 0)],
    ),
    Case("cross_entropy all ignored", F.cross_entropy, [logits, torch.full((N,), -100)], [(1, None), *_rows]),
    Case("cross_entropy large", F.cross_entropy, [logits * 1e4, target], [(1, None), *_rows]),
    Case(
        "cross_entropy old reduce",
        lambda x, t: F.cross_entropy(x, t, reduce=False),
        [logits, target],
        [(1, None)],
        local=False,
    ),
    Case("cross_entropy float32", lambda x, t: F.cross_entropy(x.float(), t), [logits, target], [(1, None), *_rows]),
    Case(
        "z loss",
        lambda x, t: F.cross_entropy(x, t) + 1e-2 * x.logsumexp(-1).pow(2).mean(),
        [logits, target],
        [(1, None)],
    ),
    Case(
        "head and loss",
        lambda x, w, t: F.cross_entropy(F.linear(x, w).view(-1, C), t.view(-1)),
        [normal(2, 3, 4), normal(C, 4), target.view(2, 3)],
        [(None, 0, None)],
        leaves=True,
    ),
    Case("gather", lambda x, i: (torch.gather(x, 1, i), x.gather(-1, i)), [logits, integers(C, N, 2)], [(1, None)]),
    Case("gather by keyword", lambda x, i: torch.gather(x, dim=1, index=i), [logits, integers(C, N, 2)], [(1, None)]),
    Case("gather fewer rows", lambda x, i: x.gather(1, i), [logits, integers(C, 2, 3)], [(1, None)]),
    Case(
        "gather another dim",
        lambda x, i: x.gather(0, i),
        [logits, integers(N, 2, C)],
        [(1, None), (1, 1), (1, 0)],
        local=None,
    ),
    Case(
        "take_along_dim",
        lambda x, i: (torch.take_along_dim(x, i, 1), x.take_along_dim(i, dim=1)),
        [logits, integers(C, N, 2)],
        [(1, None)],
    ),
    Case(
        "take_along_dim broadcast",
        lambda x, i: torch.take_along_dim(x, i, 1),
        [logits, integers(C, 1, 2)],
        [(1, None)],
        local=False,
    ),
    Case(
        "take_along_dim flat",
        lambda x, i: torch.take_along_dim(x, i),
        [logits, integers(N * C, 4)],
        [(1, None)],
        local=False,
    ),
]
