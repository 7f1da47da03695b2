"""How many places a router's masks let through, in a step that is recorded without values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.planner.recording.record import record
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.trial.mask_shares import Share


@pytest.mark.parametrize(("of", "each", "places"), [(4, 1, 10), (4, 2, 10), (7, 1, 3), (3, 5, 4)])
def test_shares_are_all_there_is(of: int, each: int, places: int) -> None:
    counts = [Share(turn, of, each).count(places) for turn in range(of)]
    assert sum(counts) == places * min(of, each) and max(counts) - min(counts) <= 1


def by_number(x: Tensor, chosen: Tensor) -> list[Tensor]:
    return [x[torch.where(chosen == i)[0]] for i in range(4)]


def by_mask(x: Tensor, chosen: Tensor) -> list[Tensor]:
    return [x[(chosen == i).any(-1)] for i in range(4)]


def by_hits(x: Tensor, chosen: Tensor) -> list[Tensor]:
    mask = F.one_hot(chosen, 5).permute(2, 1, 0)  # one class stands for none
    return [x[torch.where(mask[i[0]])[1]] for i in (mask.sum((-1, -2)) > 0).nonzero()]


class Routed(nn.Module):
    """Top-2 of 4 experts."""

    def __init__(self, route: Callable[[Tensor, Tensor], list[Tensor]], own: bool) -> None:
        super().__init__()
        self.route, self.own, self.router, self.expert = route, own, nn.Linear(8, 4), nn.Linear(8, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        chosen = self.router(batch).topk(2)[1]
        if not self.own:
            chosen = (self.router(batch) > 0)[:, :2].long()
        return torch.stack([self.expert(x).sum() for x in self.route(batch, chosen)]).sum()


def rows(step: RecordedStep) -> list[int]:
    return [
        event.outputs[0].shape[0] for event in step.events if event.name == "linear" and event.outputs[0].shape[1] == 3
    ]


@pytest.mark.parametrize("route", [by_number, by_mask, by_hits])
def test_each_expert_gets_as_many(route: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    step = record(Routed(route, True), torch.ones(10, 8))
    assert rows(step) == [5, 5, 5, 5] and step.balanced


def test_fewer_are_chosen_than_there_are_experts() -> None:
    assert rows(record(Routed(by_hits, True), torch.ones(1, 8))) == [1, 1]


def test_masks_of_anything_else_let_all_through() -> None:
    step = record(Routed(by_number, False), torch.ones(10, 8))
    assert rows(step) == [20, 20, 20, 20] and not step.balanced
