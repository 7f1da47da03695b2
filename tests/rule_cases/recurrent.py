"""Recurrent layers and draws of rows, with the samples sharded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case
from tests.rule_cases.data import normal

N, C, L, T, H = 6, 4, 8, 5, 3
line, image, rows = normal(N, C, L), normal(N, C, L, L), [(0,)]


def _layer(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(*shape) for shape in shapes]


def _recurrent(name: str, batch_first: bool, x: Tensor, h: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    states = (h, h) if name == "lstm" else h
    return getattr(torch, name)(x, states, list(weights), True, 1, 0.0, False, False, batch_first)


def _cell(name: str, x: Tensor, h: Tensor, *weights: Tensor) -> Any:
    return getattr(torch, f"{name}_cell")(x, (h, h) if name == "lstm" else h, *weights)


CASES = [
    *[
        Case(f"{name} batch_first={first}", partial(_recurrent, name, first), [x, *parameters], layouts, local=None)
        for first, x, at in ((True, normal(N, T, C), 0), (False, normal(T, N, C), 1))
        for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
        for parameters in ([normal(1, N, H), *_layer((gates * H, C), (gates * H, H), (gates * H,), (gates * H,))],)
        for layouts in ([(at, None, *[None] * 4), (at, 1, *[None] * 4), (None, 1, *[None] * 4)],)
    ],
    *[
        Case(
            f"{name}_cell",
            partial(_cell, name),
            [normal(N, C), normal(N, H), *_layer((gates * H, C), (gates * H, H), (gates * H,), (gates * H,))],
            [(0, None, *[None] * 4), (0, 0, *[None] * 4)],
        )
        for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
    ],
    *[
        Case(f"{name} of evaluation", partial(getattr(F, name), training=False), [image], rows)
        for name in ("dropout2d", "dropout3d", "feature_alpha_dropout")
    ],
    Case("dropout1d of evaluation", lambda x: F.dropout1d(x, training=False), [line], rows),
    Case(
        "draws of rows",
        lambda x: (F.gumbel_softmax(x), torch.multinomial(x.exp(), 2)),
        [normal(N, C)],
        rows,
        local=None,
        value=False,
        grad=False,
    ),
]
CASES = [replace(case, empty=False) for case in CASES]
