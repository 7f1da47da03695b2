"""What a step logs, keeps or sets in some batches alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, dry_run
from lightning_par.pipeline.program.joined_outputs import LoggedValues, unjoined
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8).mul(40).sin()


class LogsNowAndThen(LightningModule):
    """The root of a mean is no share of the batch's: microbatches must not be summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[Any] = []
        self.kept: Any = None
        self.roots: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.second(self.first(batch).tanh()).square().mean()
        root = loss.detach().sqrt()
        if batch_idx == 1:
            self.roots.append(root)
        if batch_idx == 2:
            self.log("root", root)
        if batch_idx == 4:
            self.kept = root
        return {"loss": loss, "root": root} if batch_idx == 5 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept = None if self.kept is None else float(self.kept)
        logged, returned = float(self.trainer.callback_metrics.get("root", 0)), float(outputs.get("root", 0))
        self.seen.append([logged, kept, returned, *map(float, self.roots)])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Box:
    """What a step may put into anything."""

    x: Tensor


class KeepsEarly(LogsNowAndThen):
    """What the first layer makes is of no use behind the second one, but in some batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        h = self.first(batch)
        mean = h.detach().mean()
        loss = self.second(h.tanh()).square().mean()
        if batch_idx == 1:
            self.roots.append(h)
        if batch_idx == 2:
            self.log("root", mean)
        if batch_idx == 4:
            self.kept = Box()
            self.kept.x = h
        return {"loss": loss, "root": mean} if batch_idx == 5 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept = None if self.kept is None else float(self.kept.x.sum())
        logged, returned = float(self.trainer.callback_metrics.get("root", 0)), float(outputs.get("root", 0))
        self.seen.append([logged, kept, returned, *(float(x.sum()) for x in self.roots)])


class Adapted(nn.Module):
    """A layer with another one beside it, which can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adapter, self.is_on, self.batches = nn.Linear(8, 8), nn.Linear(8, 8), True, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y + self.adapter(x) if self.is_on else y).tanh()


class SetsNowAndThen(LightningModule):
    """In some batches alone it sets what its layers hold, around a call of them or for good."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(), Adapted()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.second.batches.append(batch_idx)
        self.first.is_on = batch_idx != 1
        y = self.second(self.first(batch))
        self.first.is_on = True  # the first stage's run ends before
        if batch_idx % 3 < 2:
            return y.square().mean()
        with torch.no_grad():  # a model that it is compared with
            self.first.is_on = self.second.is_on = False
            reference = self.second(self.first(batch))
            self.first.is_on = self.second.is_on = True
        return (y - reference).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([float(outputs["loss"]), *self.second.batches])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _seen(kind: type[Any], strategy: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(0)
    module = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu", devices=1 if strategy is None else 2, max_epochs=2, precision="64-true", logger=False,
            strategy="auto" if strategy is None else PipelineParallelStrategy(2, **strategy),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, DataLoader(BATCHES, batch_size=4))  # type: ignore[arg-type]  # fmt: skip
    return list(module.seen)


_ROWS = [(LogsNowAndThen, 2), (SetsNowAndThen, 1), (SetsNowAndThen, 2), (KeepsEarly, 1), (KeepsEarly, 2)]


@long(but=["KeepsEarly-2"])
@slow("SetsNowAndThen-1", "KeepsEarly-1")
@pytest.mark.parametrize(("kind", "microbatches"), _ROWS)
def test_what_some_batches_alone_log_keep_and_set_is_one_devices(
    kind: type[Any], microbatches: int, pool: Pool
) -> None:
    (one,) = pool.run(1, _seen, kind, None)
    for found in pool.run(2, _seen, kind, {"stages": ["second"], "microbatches": microbatches}):
        for mine, wanted in zip(found, one, strict=True):
            assert mine == pytest.approx(wanted, abs=1e-9)


def test_values_that_cant_be_joined_are_found() -> None:
    share, other, state = torch.ones(()), torch.ones(()), torch.ones(())
    names = {id(share): (0, 0), id(other): (1, 0)}
    said = LoggedValues(None)
    said.log("share", share)
    said.print("share", share)
    joins = frozenset({(0, 0)})

    def found(*values: Any) -> Any:
        return unjoined(values, names, joins, lambda x: x is state)

    assert found(said.logged) is None and found({"a": [other]}) == (1, 0) and found(state) == (-1, 0)
    assert unjoined(said.printed, names, frozenset(), lambda x: False) == (0, 0)


class LogsAndWrites(LogsNowAndThen):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total = batch.sum()
        self.log("total", total)
        total += 1
        return super().training_step(batch, batch_idx) + total


def test_what_was_logged_is_not_written_into_afterwards() -> None:
    """What depends on the batch alone is computed before anything is logged: the sum with the one was."""
    with pytest.raises(NotImplementedError, match="`add_` writes into a tensor .* that was logged|`__iadd__` writes"):
        dry_run(LogsAndWrites, BATCHES[:4], {"pipeline_parallel_size": 2}, devices=2, precision="64-true")
