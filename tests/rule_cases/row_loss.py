"""Losses of each row by itself, with the rows sharded."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from tests.helpers.rule_check import Case
from tests.rule_cases.data import integers, normal, unit

N, C, T = 6, 4, 5

_target = normal(N).sign()
_LOSSES = {
    "cosine_embedding_loss": (F.cosine_embedding_loss, [normal(N, C), normal(N, C), _target]),
    "triplet_margin_loss": (F.triplet_margin_loss, [normal(N, C), normal(N, C), normal(N, C)]),
    "multi_margin_loss": (F.multi_margin_loss, [normal(N, C), integers(C, N)]),
    "multilabel_margin_loss": (F.multilabel_margin_loss, [normal(N, C), integers(C, N, C)]),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, [normal(N, C), unit(N, C).round()]),
    "gaussian_nll_loss": (F.gaussian_nll_loss, [normal(N, C), normal(N, C), unit(N, C)]),
    "gaussian_nll_loss var": (F.gaussian_nll_loss, [normal(N, C), normal(N, C), unit(N)]),
    "margin_ranking_loss": (F.margin_ranking_loss, [normal(N), normal(N), _target]),
    "hinge_embedding_loss": (F.hinge_embedding_loss, [normal(N), _target]),
    "mse_loss weighted": (lambda x, y, w, **kw: F.mse_loss(x, y, weight=w, **kw), [*normal(2, N, C), unit(N, C)]),
    "huber_loss weighted": (lambda x, y, w, **kw: F.huber_loss(x, y, weight=w, **kw), [*normal(2, N, C), unit(N, C)]),
    "ctc_loss": (
        lambda x, t, a, b, **kw: F.ctc_loss(x.log_softmax(-1), t, a, b, **kw),
        [normal(T, N, C), integers(C - 1, N, 2) + 1, torch.full((N,), T), torch.tensor([1, 2, 1, 2, 1, 2])],
    ),
    "ctc_loss joined": (
        lambda x, t, **kw: F.ctc_loss(x.log_softmax(-1), t, (T,) * N, (1, 2, 1, 2, 1, 2), **kw),
        [normal(T, N, C), integers(C - 1, 9) + 1],
    ),
}
CASES = []
for _name, (_loss, _inputs) in _LOSSES.items():
    for _reduction in ("mean", "sum", "none"):
        _plain = [None] * (len(_inputs) - 1)
        _layouts = [(1, *_plain)] if "ctc" in _name else [(0, *_plain), (0,) * len(_inputs)]
        _local = None if "ctc" in _name else True
        _call = partial(_loss, reduction=_reduction)
        CASES.append(Case(f"{_name} {_reduction}", _call, _inputs, _layouts, local=_local, empty=False))
