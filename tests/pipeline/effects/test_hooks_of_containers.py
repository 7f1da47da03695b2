"""Hooks that all ranks of a pipeline refuse, whichever of them has what is hooked."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.trial.study import study
from lightning_par.sharded.patches import NODES
from lightning_par.trial.step import Step
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.surface import trained

BATCH = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


class Net(nn.Module):
    """A layer, and others in a container with a full backward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).double()
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        self.rest.register_full_backward_hook(lambda *_: None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.rest(self.first(batch)).sum()  # type: ignore[no-any-return]


def _study(first: int, *rest: int) -> None:
    homes = {"first": (first,), **{f"rest.{n}": (rank,) for n, rank in enumerate(rest)}}
    step = Step(Net(), "training_step", BATCH, (0,), nullcontext, True, torch.device("cpu"))
    with NODES.installed():
        study(step, Stages(homes, at=tuple(dict.fromkeys((first, *rest)))), 1)


def test_a_full_backward_hook_wants_both_ends_of_its_module_in_one_stage() -> None:
    with pytest.raises(NotImplementedError, match="A Sequential has a full backward hook, and its layers are taken ap"):
        _study(0, 0, 1)


class Hooked(LightningModule):
    """Hooks the nodes of autograd's graph that add to its weights' gradients, before its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.view(-1).expand_as(p.view(-1)).grad_fn.next_functions[0][0].register_hook(lambda *_: None)  # type: ignore[union-attr]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit() -> Any:
    return trained(Hooked(), DataLoader(BATCH, batch_size=2), PipelineParallelStrategy)  # type: ignore[arg-type]


def test_nodes_of_autograd_behind_weights_are_no_ranks_to_hook(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _fit)
    reports = failed.value.reports.values()
    assert all("of which each rank of a pipeline has those of its own stages" in x for x in reports)
