"""What a trial run of a step tells of the code that ran."""

from __future__ import annotations

import sys

import torch

from lightning_par.planner.notes import in_variables


def test_tensors_are_held_by_variables_and_by_what_these_hold() -> None:
    x, kept = torch.zeros(1), {"a": [torch.zeros(2)]}
    deep = [[[torch.zeros(3)]]]

    def call(y: torch.Tensor) -> set[int]:
        return {id(one) for one in in_variables(sys._getframe())}

    y = torch.zeros(4)
    found = call(y)
    assert {id(x), id(y), id(kept["a"][0])} <= found and id(deep[0][0][0]) not in found
