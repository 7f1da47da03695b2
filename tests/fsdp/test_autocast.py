"""Blocks under autocast: weights travel together, each in the precision that it is used in; results don't change."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ledger
from lightning_par.fsdp.block_use import Use
from lightning_par.fsdp.part import StoragePart
from lightning_par.fsdp.served import Precisions
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

WIDTH, LAYERS = 8, 3
LINEAR, BIAS, NORM, SCALE, SPARE = WIDTH * WIDTH, WIDTH, 2 * WIDTH, WIDTH, WIDTH * WIDTH + WIDTH


class Layer(nn.Module):
    """Weights that autocast casts, weights that it does not, one that is used both ways, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.spare = nn.Parameter(torch.ones(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x)))) + self.down.weight.square().mean()
        return x + self.scale * y


class Clamps(Layer):
    """Writes to weights in the call, before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        self.down.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Sometimes(Layer):
    """Uses a layer in some steps alone, and by a replica alone; a weight in another precision than before."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = super().forward(x)
        if self.calls % 2 == 0 and x.flatten()[0] > 0:
            x = self.spare(x)
        return x + self.up.weight.float().mean() if self.calls > 2 else x


class Checks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Teaches(Layer):
    """Runs once more under no_grad, and a part of it without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            x = self.up(x.float())
        return super().forward(x) - 0.1 * target


class Apart(Layer):
    """The model calls it without autocast, too."""


class Model(L.LightningModule):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(kind() for _ in range(LAYERS))
        self.moved: list[list[tuple[str, int]]] = []

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, Apart):
                with torch.autocast("cpu", enabled=False):
                    x = layer(x.float())
        return x.float().square().mean()

    def validation_step(self, batch: Tensor) -> None:
        for layer in self.layers[:2]:
            batch = layer(batch)

    def on_train_batch_start(self, *args: Any) -> None:
        self._open = ledger()
        self._moved = self._open.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self._open.__exit__(None, None, None)
        self.moved.append([(t.verb, t.nbytes) for t in self._moved.select(purpose="parameters")])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _train(kind: type[Layer], precision: Any, blocks: bool, **options: Any) -> tuple[dict[str, Tensor], Any]:
    L.seed_everything(0, verbose=False)
    model = Model(kind)
    x = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(1))[int(os.environ["RANK"]) :: 2]
    strategy = HybridParallelStrategy(data_parallel="fsdp", **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, precision=precision,
    )  # fmt: skip
    one_by_one = mock.patch.object(StoragePart, "_take_blocks", lambda *args: None)
    loader = DataLoader(x, batch_size=None)  # type: ignore[arg-type]
    if blocks:
        trainer.fit(model, loader, loader)
    else:
        with one_by_one:
            trainer.fit(model, loader, loader)
    return model.state_dict(), model.moved


@slow("Clamps", "Teaches", "Checks", "Layer")
@pytest.mark.parametrize("kind", [Layer, Clamps, Checks, Teaches, Apart])
def test_results_are_those_of_weights_that_travel_one_by_one(pool: Pool, kind: type[Layer]) -> None:
    expected = pool.run(2, _train, kind, "bf16-mixed", False)
    for (found, _), (state, _) in zip(pool.run(2, _train, kind, "bf16-mixed", True), expected, strict=True):
        for name, x in state.items():
            torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_a_replica_alone_may_use_a_weight_and_later_steps_in_another_precision(pool: Pool) -> None:
    first, second = pool.run(2, _train, Sometimes, "bf16-mixed", True, timeout=60)
    for name, x in first[0].items():
        assert torch.equal(x, second[0][name]), name


# Of weights and gradients, after the first step: products' weights in two bytes, others in four.
LOW = LINEAR + BIAS + BIAS  # of up and, of down, the bias alone
HIGH = LINEAR + NORM + SCALE + SPARE
FLAGS = 2 * 4 * 9  # whether any of nine weights has a gradient, to each of two ranks


def test_a_block_has_three_messages_a_step_in_the_precisions_of_use(pool: Pool) -> None:
    for _, moved in pool.run(2, _train, Layer, "bf16-mixed", True):
        gathers = [size for verb, size in moved[-1] if verb == "all_gather"]
        sums = [size for verb, size in moved[-1] if verb == "reduce_scatter"]
        # all of `first` are products'; the last layer's are gathered for backward along with forward
        assert sorted(gathers) == sorted([2 * (LINEAR + BIAS)] + [2 * LOW + 4 * HIGH] * (2 * LAYERS - 1))
        assert sorted(sums) == sorted([4 * (LINEAR + BIAS) + 2 * 4 * 2] + [4 * (LOW + HIGH) + FLAGS] * LAYERS)
        # in the first step, too, but that it is not yet known which layer is the last one
        assert len(moved[0]) == len(moved[-1]) + 1


def test_backward_keeps_no_cast_copies(pool: Pool) -> None:
    for alive in pool.run(2, _alive):
        assert alive == [0] * LAYERS


def _alive() -> list[int]:
    """Of the weights of each layer, how many are still there when backward has summed their gradients."""
    found: list[int] = []
    plain = Use.sum

    def watched(use: Use, gradients: Any) -> Tensor:
        found.append(sum(x is not None for x in use.wholes or ()))
        return plain(use, gradients)

    with mock.patch.object(Use, "sum", watched):
        _train(Layer, "bf16-mixed", True)
    return found[-LAYERS - 1 : -1]


def test_weights_travel_in_a_low_precision_where_that_is_their_only_use() -> None:
    precisions = Precisions([torch.float32] * 4)
    assert not precisions.is_asked
    for number, dtype in [(0, torch.bfloat16), (1, torch.float32), (2, torch.bfloat16), (2, torch.float32)]:
        precisions.ask(number, dtype)
    assert precisions.decide() and not precisions.decide()
    assert precisions.travel == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
