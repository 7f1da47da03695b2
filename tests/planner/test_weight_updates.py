"""A plan of a step that updates weights by others, as momentum encoders do, against a dry run of each rank: exactly."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import by_axis
from lightning_par.planner.recording.updates import WeightCall, WeightMessage, messages_of
from tests.helpers.slow import long, slow
from tests.planner.counted import ranks_of


class Twins(L.LightningModule):
    """Layers of one product each, so that split features go from one to the next; a network and its average."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def update(self) -> None: ...

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.update()
        return (self.net(batch[0]) - self.teacher(batch[0]).detach()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class InPlace(Twins):
    def update(self) -> None:
        for p, q in zip(self.net.parameters(), self.teacher.parameters()):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)


class Assigns(Twins):
    @torch.no_grad()
    def update(self) -> None:
        for p, q in zip(self.net.parameters(), self.teacher.parameters()):
            q.data = q.data * 0.9 + p.data * 0.1


class Copies(Twins):
    @torch.no_grad()
    def update(self) -> None:
        for p, q in zip(self.net.parameters(), self.teacher.parameters()):
            q.copy_(q * 0.9 + p * 0.1)


class Normalizes(Twins):
    """Makes values that do not go entry by entry."""

    @torch.no_grad()
    def update(self) -> None:
        for p, q in zip(self.net.parameters(), self.teacher.parameters()):
            q.copy_(F.normalize(p, dim=0))


class Mixes(Twins):
    """Makes values of weights of several ranks, of which one goes to two places."""

    @torch.no_grad()
    def update(self) -> None:
        first, last = self.net[0][0].weight, self.teacher[3][0].weight
        mixed = first * 0.5 + last @ first
        last.copy_(mixed.t())
        self.teacher[0][0].weight.lerp_(mixed.clone(), 0.1)


class Lists(Twins):
    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_([*self.teacher.parameters()], [*self.net.parameters()], 0.1)


class Averages(Twins):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)

    def update(self) -> None:
        self.teacher.update_parameters(self.net)


STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": STAGES,
    "stages_4": STAGES | {"pipeline_parallel_size": 4},
    "zbv": STAGES | {"schedule": "zbv"},
    "stages_tensor": STAGES | {"tensor_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "tensor_4": {"tensor_parallel_size": 4},
}
KINDS = [Twins, InPlace, Assigns, Copies, Normalizes, Mixes, Lists, Averages]
ROWS = [(kind, layout) for kind in KINDS for layout in LAYOUTS]


@long()
@slow(but=["Assigns-stages"])
@pytest.mark.parametrize(("kind", "layout"), ROWS, ids=[f"{kind.__name__}-{layout}" for kind, layout in ROWS])
def test_each_rank_holds_and_sends_what_was_said(kind: type[Twins], layout: str) -> None:
    asked, batch = LAYOUTS[layout], [torch.ones(4, 8)]
    ranks = ranks_of(asked)
    said = plan(kind, batch, "8xH100", devices=ranks, layout=asked).as_dict()["layouts"][0]["ranks"]
    for rank in range(ranks):
        found = dry_run(kind, batch, asked, devices=ranks, rank=rank)
        sent = by_axis(found.sent)
        assert (said[rank]["parameters"], said[rank]["gradients"]) == (found.parameters, found.gradients)
        assert {axis: size for axis, size in said[rank]["sent"].items() if size} == {k: v for k, v in sent.items() if v}


class Between(InPlace):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - self.teacher(batch[0]).detach()).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.update()


@long()
def test_what_hooks_send_is_said_to_be_counted_in_dry_runs() -> None:
    told = [plan(kind, [torch.ones(4, 8)], "8xH100", devices=2, layout=STAGES).notes for kind in (InPlace, Between)]
    wanted = "counted in dry runs of ranks: what on_train_batch_end of the module sends, as of weights of other ranks"
    assert not any("on_train" in note for note in told[0]) and wanted in told[1]


def test_a_value_of_weights_is_made_where_it_is_wanted_or_where_they_all_are() -> None:
    holders = {"net": frozenset({0}), "teacher": frozenset({1}), "both": frozenset({0, 1})}
    scaled = WeightCall(0, (("net", 8),), wanted="teacher")  # stays on rank 0
    summed = WeightCall(1, (("teacher", 8), (0, 8)), wanted="teacher")  # on rank 1
    written = WeightCall(2, ((1, 8), ("both", 4)), "teacher", wanted="teacher")
    assert messages_of([scaled, summed, written], holders, 2) == [WeightMessage(0, "net", 8)]
    assert messages_of([WeightCall(0, (("net", 8),), "both")], holders, 2) == [WeightMessage(0, "net", 8)]
