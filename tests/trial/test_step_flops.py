"""FLOPs of a recorded step: by hand, and as torch counts them of a step that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_par.trial.step_flops import step_flops
from lightning_par.trial.trial_run import record_step


class Net(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.body(batch)
        return (out[0] if isinstance(out, tuple) else out).square().mean()


class Checkpointed(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": checkpoint(self.body, batch, use_reentrant=False).square().mean()}


class Partly(Net):
    """Of whose products some need no gradient."""

    body: nn.Sequential

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.body[0](batch)
        self.body[0](batch).sum()  # is no part of the loss
        return self.body[1](self.body[0](batch).detach()).sum()


class WritesIntoARow(Net):
    body: nn.Sequential

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.body[0].weight[0].zero_()  # type: ignore[operator, index]
        return super().training_step(batch, batch_idx)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def _counted(net: Net, batch: Tensor) -> int | None:
    return step_flops(record_step(net, "training_step", batch))


FIRST, SECOND = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
"""Of the layers' products, of five rows."""


def _frozen(layers: nn.Sequential) -> nn.Sequential:
    layers[1].requires_grad_(False)
    return layers


@pytest.mark.parametrize(
    ("net", "flops"),
    [
        (Net(_layers()), 2 * FIRST + 3 * SECOND),
        (Net(_frozen(_layers())), 2 * FIRST + 2 * SECOND),
        (Checkpointed(_layers()), 2 * FIRST + 3 * SECOND),
        (Partly(_layers()), 3 * FIRST + 2 * SECOND),
        (WritesIntoARow(_layers()), 2 * FIRST + 3 * SECOND),
    ],
    ids=["all", "frozen", "checkpointed", "partly", "writes into a row"],
)
def test_flops_by_hand(net: Net, flops: int) -> None:
    assert _counted(net, torch.ones(5, 8)) == flops


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (_layers(), (5, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3, groups=2)), (2, 3, 8, 8)),
        (nn.Sequential(nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 8)),
    ],
    ids=["linear", "convolutions", "transposed"],
)
def test_flops_are_those_that_torch_counts(body: nn.Module, shape: tuple[int, ...]) -> None:
    net, batch = Net(body), torch.ones(shape)
    with FlopCounterMode(display=False) as counter:
        net.training_step(batch, 0).backward()
    counted = _counted(net, batch)
    assert counted == counter.get_total_flops() and counted


def test_attention_counts_its_products() -> None:
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    tokens, pairs = 2 * 6, 2 * 6 * 6
    weights = 8 * 24 + 8 * 8 + 2 * 8 * 16
    last = 2 * tokens * 8 * 24  # the batch needs no gradient
    assert _counted(Net(attention), torch.randn(2, 6, 8)) == 3 * 2 * (tokens * weights + pairs * 2 * 8) - last
