"""Steps that write values of the model into a buffer by another object for it, which is the buffer for all that."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(12, 8).sin()


class Codebook(nn.Module):
    """As those of vector quantization: it has no weights, so that its code is the step's own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("codes", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        mean, codes = x.detach().mean(0), self.codes
        if self.way == "data":
            codes.data.lerp_(mean, 0.2)
        elif self.way == "detach":
            codes.detach().lerp_(mean, 0.2)
        elif self.way == "data, after a use":
            nearest = (x[:, :, None] - codes).abs().argmin(-1)
            codes.data.copy_(codes * 0.8 + mean * 0.2)
            return x * codes[nearest]
        elif self.way == "rows of data":
            codes.data[2:].lerp_(mean[2:], 0.2)
            return x
        else:
            codes.detach().lerp_(mean, 0.2)
            codes.data.mul_(0.9)
        return x * self.codes


class RowsThenAll(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        self.codes.data[2:].lerp_(x.detach().mean(0)[2:], 0.2)
        return x * self.codes


class AfterGradients(Codebook):
    """Its backward reads what is written."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.codes
        self.codes.data.lerp_(x.detach().mean(0), 0.2)
        return y


class Quantizes(LightningModule):
    def __init__(self, codebook: nn.Module) -> None:
        super().__init__()
        self.first, self.codebook, self.last = nn.Linear(8, 8), codebook, nn.Linear(8, 8)

    def training_step(self, batch: Tensor) -> Any:
        return self.last(self.codebook(self.first(batch).relu())).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(codebook: nn.Module, **layout: Any) -> Any:
    torch.manual_seed(0)
    strategy = partial(PipelineParallelStrategy, **layout)
    return trained(Quantizes(codebook), DataLoader(BATCHES, batch_size=4), strategy)  # type: ignore[arg-type]


def _fit_each() -> Any:
    ways = ("data", "detach", "data, after a use", "rows of data", "detach, then data")
    return {way: _fit(Codebook(way)) for way in ways}


@long()
def test_a_buffer_is_written_into_by_another_object_for_it(pool: Pool) -> None:
    check(pool, _fit_each)


def _refused(kind: type[Codebook]) -> str:
    with pytest.raises(ValueError, match="microbatches=2: ") as error:
        _fit(kind(""), microbatches=2)
    return str(error.value)


def _fit_kind(kind: type[Codebook]) -> Any:
    return _fit(kind(""))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            RowsThenAll,
            "`lerp_` writes a value that depends on the model into a tensor that did not, and of which there",
        ),
        (AfterGradients, "backward then reads the new value. The stage of a pipeline that used it does not have that"),
    ],
)
def test_what_other_stages_would_have_to_see_has_no_schedule(kind: type[Codebook], reason: str, pool: Pool) -> None:
    for message in pool.run(2, _refused, kind):
        assert "test_written_buffers.py" in message
        assert reason in message
    check(pool, _fit_kind, kind)
