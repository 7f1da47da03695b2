"""What a forward before the run has left on a module, as its first call in `__init__`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.sharded.lost_graphs import has_no_graph, refuse_gradient
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 8 * 8, dtype=torch.float64).view(8, 8).mul(40).sin()
LAYOUTS = {"pipeline": {"pipeline_parallel_size": 2}, "fsdp": {"data_parallel_size": 2, "data_parallel": "fsdp"}}


class Encoder(nn.Module):
    """Hands out what a hook has stored, as torchgeo's BYOL does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.projector = nn.Linear(8, 8)
        self.layers[1].register_forward_hook(self._store)
        self(torch.zeros(2, 8))

    def _store(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.encoded = self.projector(out)

    def forward(self, x: Tensor) -> Tensor:
        self.layers(x)
        return self.encoded


class Stored(LightningModule):
    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.encoder, self.head = Encoder(), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        before = self.encoder.encoded.sum() if self.early else 0.0
        loss = self.head(self.encoder(batch)).square().mean() + before
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        used = [*self.encoder.layers[0].parameters(), *self.encoder.projector.parameters(), *self.head.parameters()]
        return torch.optim.Adam(used, lr=0.05)


def _fit(layout: str, early: bool = False) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, **LAYOUTS[layout])  # type: ignore[arg-type]
    return trained(Stored(early), DataLoader(BATCHES, batch_size=4), strategy, use_distributed_sampler=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_split_though_a_forward_has_left_its_result(layout: str, pool: Pool) -> None:
    check(pool, _fit, layout)


def test_a_gradient_of_what_was_computed_before_the_run_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="'encoded' of a Encoder was computed by weights that have been split"):
        pool.run(2, _fit, "fsdp", True)


def test_a_gradient_of_a_tensor_without_its_graph_is_refused() -> None:
    x = refuse_gradient(torch.ones(1), "It was computed elsewhere.")
    assert has_no_graph(x) and not has_no_graph(torch.ones(1))
    with pytest.raises(RuntimeError, match="computed elsewhere"):
        (2 * x).sum().backward()
