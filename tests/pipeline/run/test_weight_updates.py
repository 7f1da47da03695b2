"""Steps that update weights by weights alone: a teacher's momentum update, a copy of one network to another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, LayerPlacementStrategy, dry_run
from lightning_par.pipeline.program.tape import Absent
from lightning_par.pipeline.program.update_calls import UpdateCall, joined_calls
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8).mul(40).sin()
PIPELINE = {"pipeline_parallel_size": 2, "stages": ["target"]}


def _net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))


class Pair(LightningModule):
    """A network on one stage, and its teacher on the other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.net = way, _net()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        for p in self.target.parameters():
            p.add_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        where, _, how = self.way.partition(" ")
        update: Callable[[], None] = getattr(self, how)
        if where in ("first", "both"):
            update()
        if where == "told":  # which is why both ranks have that weight
            update()
            self.log("target", self.target[0][0].weight.norm())  # type: ignore[index]
        x = self.net(batch)
        if where == "between":  # as in MoCo
            update()
        with torch.no_grad():
            y = self.target(batch + 0.1)
        if where in ("last", "both"):
            update()
        loss = F.mse_loss(x, y) + x.square().mean()
        if where == "guarded":
            if not loss < 0.5:  # of which no rank knows before
                return None
            update()
        self.log("loss", loss)
        return loss if where != "kept" else self.kept(batch, loss)

    @torch.no_grad()
    def data(self) -> None:
        momentum = 1 - 0.5 / (self.global_step + 1)
        for p, q in zip(self.net.parameters(), self.target.parameters()):
            q.data = q.data * momentum + p.data * (1.0 - momentum)

    def in_place(self) -> None:
        for p, q in zip(self.net.parameters(), self.target.parameters()):
            q.data.mul_(0.9).add_(p.detach(), alpha=0.1)

    @torch.no_grad()
    def foreach(self) -> None:
        torch._foreach_lerp_([*self.target.parameters()], [*self.net.parameters()], 0.1)

    def state(self) -> None:
        if self.global_step % 3 == 0:  # as in DQN
            self.target.load_state_dict(self.net.state_dict())

    @torch.no_grad()
    def one(self) -> None:
        at = self.global_step % 2  # another one in each step
        self.target[at][0].weight.copy_(F.normalize(self.net[at][0].weight, dim=1))  # type: ignore[index]

    @torch.no_grad()
    def vector(self) -> None:
        mixed = parameters_to_vector(self.target.parameters()) * 0.9 + parameters_to_vector(self.net.parameters()) * 0.1
        vector_to_parameters(mixed, self.target.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.05)


def _fit(way: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    placed = "placement" in layout
    strategy = (
        partial(LayerPlacementStrategy, **layout) if placed else partial(HybridParallelStrategy, **PIPELINE, **layout)
    )
    return trained(Pair(way), DataLoader(BATCHES, batch_size=4), strategy, use_distributed_sampler=False)  # type: ignore[arg-type]


WAYS = [
    "first data",
    "first in_place",
    "first foreach",
    "first vector",
    "first one",
    "first state",
    "between data",
    "last in_place",
    "last state",
    "both data",
    "told data",
    "told vector",
]


@long(but=["first foreach"])
@slow(
    "first in_place",
    "first vector",
    "first state",
    "both data",
    "told vector",
    "first data",
    "between data",
    "last in_place",
)
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_updated_as_on_one_device(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"microbatches": 2})


@long("guarded in_place")
@slow("first data", "last state")
@pytest.mark.parametrize("way", ["first data", "first foreach", "last state", "guarded in_place"])
def test_weights_are_updated_with_whole_batches(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"microbatches": 1})


@slow()
@pytest.mark.parametrize("way", ["first data", "between data", "last in_place", "last state"])
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel": "fsdp"}, {"data_parallel_size": 2}],
    ids=["tensor", "fsdp", "data"],
)
def test_weights_in_parts_are_updated(way: str, layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit, way, layout, world=4)


@slow("last in_place")
@pytest.mark.parametrize("way", ["first data", "last in_place"])
def test_weights_on_placed_devices_are_updated(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"placement": {"net": 0, "target": 1}})


class Decided(Pair):
    """Goes by its loss, which a trial doesn't have, so that one rank alone comes to what follows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.target(self.net(batch)).square().mean()
        if loss > 1e-9:
            self.in_place()
        return loss


class Copies(Pair):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            y = copy.deepcopy(self.net)(batch)
        return F.mse_loss(self.target(self.net(batch)), y)


def _fit_plainly(kind: type[Pair]) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, **PIPELINE)
    return trained(kind(""), DataLoader(BATCHES, batch_size=4), strategy, use_distributed_sampler=False)  # type: ignore[arg-type]


def test_what_one_stage_alone_would_do_with_weights_is_one_devices(pool: Pool) -> None:
    """All ranks run such a step, layer by layer."""
    check(pool, _fit_plainly, Decided)


def test_a_deep_copy_has_no_schedule(pool: Pool) -> None:
    check(pool, _fit_plainly, Copies)
    with pytest.raises(NotImplementedError, match="makes a deep copy of 'net.0.0.weight'"):
        dry_run(lambda: Copies(""), BATCHES[:4], PIPELINE, devices=2, precision="64-true")


class Refused(Pair):
    """Each update comes between two uses of what it writes into, or of what stands for it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.way == "logged":
            self.log("scale", self.scale)
            self.scale.data.mul_(0.5)
        view = self.target[0][0].weight.detach()[0]  # type: ignore[index]
        before = self.target(self.net(batch)).square().mean() * self.scale
        if self.way == "drawn":
            self.net[0][0].weight.data.add_(torch.rand_like(self.net[0][0].weight))  # type: ignore[index]
        elif self.way == "shared":
            self.net[0][0].weight.data = self.target[0][0].weight.data  # type: ignore[index]
        elif self.way != "logged":
            self.in_place()
        if self.way == "viewed":
            return before + view.sum() * self.net(batch).sum()
        return before + self.target(self.net(batch)).square().mean() * self.scale


@long(but=["logged"])
@slow("viewed", "used again")
@pytest.mark.parametrize("way", ["used again", "viewed", "drawn", "shared", "logged"])
def test_updates_that_stages_would_see_in_part_have_no_schedule(way: str) -> None:
    with pytest.raises(NotImplementedError, match="the step writes into '.*', which is used on ranks 0 and 1"):
        dry_run(lambda: Refused(way), BATCHES[:4], {**PIPELINE, "microbatches": 1}, devices=2, precision="64-true")


@pytest.mark.parametrize("told", ["alike", "another number", "another batch", "one more", "another weight"])
def test_microbatches_of_their_own_must_update_weights_alike(told: str) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]

    def call(index: int, weight: int = 0, by: float = 0.5, of_batch: float = 2.0) -> UpdateCall:
        given = (weights[weight], Absent((index, 0)), torch.full((2,), of_batch))
        return UpdateCall(index, torch.addcmul, given, {"value": by}, "step.py:1", False, (True,), {})

    others = {
        "alike": [call(7)],
        "another number": [call(3, by=0.25)],
        "another batch": [call(3, of_batch=1.0)],
        "one more": [call(3), call(4)],
        "another weight": [call(3, weight=1)],
    }
    parts = [[call(3)], others[told]]
    if told == "alike":
        assert joined_calls(parts) is parts[0]
    else:
        with pytest.raises(ValueError, match="step.py:1: the step updates weights by what is in its batch"):
            joined_calls(parts)


@long()
def test_a_dry_run_updates_weights() -> None:
    found = dry_run(lambda: Pair("first data"), BATCHES[:4], PIPELINE, devices=2, precision="64-true")
    weights = sum(p.numel() for p in _net().parameters()) * 8
    assert found.sent["pipeline", "weights"] == weights  # to where the teacher is, which is averaged there
