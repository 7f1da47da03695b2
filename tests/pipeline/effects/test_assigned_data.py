"""Layers that write what they compute into their own tensors: codebooks, running means."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 16 * 8, dtype=torch.float64).view(16, 8).mul(40).sin()
CODES = 5


class Codebook(nn.Module):
    """Moves its codes to what they stand for, as VQ-VAE does: a buffer, or the weights of an embedding."""

    def __init__(self, how: str) -> None:
        super().__init__()
        of, self.how = how.split()
        self.embedding = nn.Embedding(CODES, 8) if of == "weight" else None
        self.register_buffer("codes", torch.linspace(-1, 1, CODES * 8).view(CODES, 8).mul(9).sin())
        self.register_buffer("sizes", torch.ones(CODES))
        self.register_buffer("sums", self.codes.clone())

    @property
    def book(self) -> Tensor:
        return self.codes if self.embedding is None else self.embedding.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x.detach(), self.book.detach()).argmin(1)
        found = F.embedding(chosen, self.book.detach())
        if self.training:
            self._move(x.detach(), F.one_hot(chosen, CODES).to(x.dtype))
        return x + (found - x).detach(), F.mse_loss(found, x)

    @torch.no_grad()
    def _move(self, x: Tensor, given: Tensor) -> None:
        if self.how == "in_place":
            self.sizes.mul_(0.9).add_(given.sum(0), alpha=0.1)
            self.sums.lerp_(given.t() @ x, 0.1)
            self.book.copy_(self.sums / self.sizes[:, None])
        elif self.how == "data":
            self.sizes.data = self.sizes * 0.9 + given.sum(0) * 0.1
            self.sums.data = self.sums * 0.9 + given.t() @ x * 0.1
            self.book.data = self.sums / self.sizes[:, None]
        else:
            self.sizes, self.sums = self.sizes * 0.9 + given.sum(0) * 0.1, self.sums * 0.9 + given.t() @ x * 0.1
            codes = self.sums / self.sizes[:, None]
            if self.embedding is None:
                self.codes = codes
            else:
                self.embedding.weight = nn.Parameter(codes)


class Running(nn.Module):
    """Keeps something of what it has met."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)
        self.register_buffer("met", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "mean":
            self.met.data = self.met * 0.9 + y.detach().mean(0) * 0.1
        elif self.how == "longer":
            self.met.data = torch.cat([self.met, y.detach().sum().view(1)])
        elif self.how == "count":  # which each microbatch would do
            self.met.data = self.met + 1
        return y / (1 + self.met.square().sum())


class Net(LightningModule):
    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)
        self.codebook = Codebook(how) if kind == "codes" else None
        self.running = Running(how) if kind == "running" else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, loss = self.first(batch), torch.zeros(())
        if self.codebook is not None:
            x, loss = self.codebook(x)
        if self.running is not None:
            x = self.running(x)
        loss = F.mse_loss(self.last(x), batch) + loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.first.parameters(), *self.last.parameters()], lr=0.05)


def _fit(kind: str, how: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, **layout)
    return trained(Net(kind, how), DataLoader(BATCHES, batch_size=4), strategy)


@long("codes-buffer data")
@slow(
    "codes-buffer in_place",
    "codes-buffer replaced",
    "codes-weight in_place",
    "running-mean",
    "codes-weight data",
    "codes-weight replaced",
    "running-longer",
)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("codes", f"{of} {how}") for of in ("buffer", "weight") for how in ("in_place", "data", "replaced")),
        *(("running", how) for how in ("mean", "longer", "count")),
    ],
)
def test_what_a_layer_computes_for_itself_is_one_devices(kind: str, how: str, pool: Pool) -> None:
    check(pool, _fit, kind, how, {"pipeline_parallel_size": 2})


@pytest.mark.parametrize("how", ["buffer data", "weight data"])
def test_codes_along_a_tensor_axis_are_one_devices(how: str, pool: Pool) -> None:
    check(pool, _fit, "codes", how, {"tensor_parallel_size": 2})
