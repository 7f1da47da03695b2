"""Regions that backward runs again in a pipeline: as one, or where stages cut them, or they are given a part of the
batch, each unit by itself. A plan counts, and has live, what a run does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(LightningModule):
    """Two layers of it are run again together.

    Args:
        given: whether these are given what depends on the batch alone.
        pairs: how many.
    """

    def __init__(self, given: bool, pairs: int) -> None:
        super().__init__()
        self.given, self.stem, self.head = given, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2 * pairs))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, scale = self.stem(batch), batch.abs().mean(-1, keepdim=True)
        for first, second in zip(self.blocks[::2], self.blocks[1::2]):
            given = (first, second, x, scale) if self.given else (first, second, x)
            x = checkpoint(_both, *given, use_reentrant=False)
        return self.head(x).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _both(first: nn.Module, second: nn.Module, x: Tensor, scale: Tensor | None = None) -> Tensor:
    x = first(x)
    return second(x if scale is None else x * scale)  # type: ignore[no-any-return]


PIPELINE: dict[str, Any] = dict(pipeline_parallel_size=2, microbatches=2)
KINDS = {"whole": (False, 2), "cut": (False, 3), "given": (True, 2)}


def _batch() -> Tensor:
    return torch.ones(4, WIDTH)


def _loader() -> Any:
    return DataLoader([_batch()] * 4, batch_size=None)  # type: ignore[arg-type]


def _real(kind: str, layout: dict[str, Any]) -> Counted:
    return trained(Model(*KINDS[kind]), _loader(), layout)


def _peak(kind: str, layout: dict[str, Any]) -> int:
    return peaks.trained(Model(*KINDS[kind]), _loader(), layout)[0]


@long()
@slow(but=["given"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent(kind: str, pool: Pool) -> None:
    layout = PIPELINE | dict(tensor_parallel_size=2)
    machine = replace(read_machine("8xH100")[0], gpu=False)
    found = layout_dict(Planner(partial(Model, *KINDS[kind]), _batch(), machine).evaluate(layout, 4))
    said = [Counted(one["parameters"], one["gradients"], one["optimizer"], one["sent"]) for one in found["ranks"]]
    assert not differences(pool.run(4, _real, kind, layout), said)


@long()
@slow(but=["cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lives(kind: str, pool: Pool) -> None:
    found = [min(pair) for pair in zip(*(pool.run(2, _peak, kind, PIPELINE) for _ in range(2)), strict=True)]
    said = peaks.said(partial(Model, *KINDS[kind]), _batch(), PIPELINE)
    assert found == [pytest.approx(size, rel=peaks.WITHIN) for size in said]
