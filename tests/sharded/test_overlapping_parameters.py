"""Tensors in whose memory parameters lie are found wherever modules and callbacks hold them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_par.sharded.overlapping_parameters import overlapping


class Slotted:
    __slots__ = ("row",)

    def __init__(self, row: Tensor) -> None:
        self.row = row


HELD: dict[str, Any] = {
    "itself": lambda row: row,
    "deep": lambda row: [[{"a": [[(row,)]]}]],
    "attribute": lambda row: SimpleNamespace(row=row),
    "slot": lambda row: [Slotted(row)],
    "deque": lambda row: deque([1, row]),
}


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize("by_callback", [False, True])
def test_views_of_a_parameter_are_found(how: str, by_callback: bool) -> None:
    model, holder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), SimpleNamespace()
    held = HELD[how](model[0].weight.detach()[0])  # type: ignore[operator, index]
    (holder if by_callback else model[1]).held = held
    assert list(overlapping(model, [holder])) == ["0.weight"]


def test_what_holds_itself_is_looked_at_once() -> None:
    model = nn.Linear(2, 2)
    model.held = [model, []]  # type: ignore[assignment]
    model.held.append(model.held)  # type: ignore[operator, union-attr]
    assert overlapping(model) == {}
