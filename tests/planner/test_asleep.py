"""Layers that run without autograd, or that no backward comes to, and layers that a step freezes: what fsdp gathers,
sums and has live is what a plan says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.planner import Planner
from lightning_par.planner.report import layout_dict
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner import peaks
from tests.planner.counted import Counted, differences, trained

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Model(LightningModule):
    """With a block beside its layers.

    Args:
        kind: what the step does with that.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stem, self.head = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks, self.beside = nn.ModuleList(Block() for _ in range(3)), Block()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.kind == "frozen":
            self.blocks[1].requires_grad_(False)
        x = self.stem(batch)
        if self.kind.startswith("asleep"):
            with torch.no_grad():
                y = self.beside(x)
            x = x + y
        if self.kind == "asleep_first":
            x = self.beside(x)
        for block in self.blocks:
            x = block(x)
        if self.kind == "detached":
            x = x + self.beside(x.detach()).detach()
        return self.head(x).pow(2).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


KINDS = ("asleep", "asleep_first", "detached", "frozen")
FSDP: dict[str, Any] = dict(data_parallel_size=2, data_parallel="fsdp")
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp": FSDP, "fsdp_kept": FSDP | dict(reshard_after_forward=False)}


def _batch() -> Tensor:
    return torch.ones(6, WIDTH)


def _loader() -> Any:
    return DataLoader([_batch()] * 8, batch_size=None)  # type: ignore[arg-type]


def _real(kind: str, layout: dict[str, Any]) -> Counted:
    return trained(Model(kind), _loader(), layout)


def _peak(kind: str, layout: dict[str, Any]) -> int:
    return peaks.trained(Model(kind), _loader(), layout)[0]


@long("asleep-fsdp")
@slow(but=["asleep-fsdp", "asleep_first-fsdp_kept", "detached-fsdp"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_gathered_and_summed(kind: str, name: str, pool: Pool) -> None:
    machine = replace(read_machine("8xH100")[0], gpu=False)
    found = layout_dict(Planner(partial(Model, kind), _batch(), machine).evaluate(LAYOUTS[name], 2))
    said = [Counted(one["parameters"], one["gradients"], one["optimizer"], one["sent"]) for one in found["ranks"]]
    assert not differences(pool.run(2, _real, kind, LAYOUTS[name]), said)


@long()
@slow(but=["asleep-fsdp"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lives(kind: str, name: str, pool: Pool) -> None:
    found = [min(pair) for pair in zip(*(pool.run(2, _peak, kind, LAYOUTS[name]) for _ in range(2)), strict=True)]
    said = peaks.said(partial(Model, kind), _batch(), LAYOUTS[name])
    assert found == [pytest.approx(size, rel=peaks.WITHIN) for size in said]
