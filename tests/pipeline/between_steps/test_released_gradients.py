"""Gradients of the step before: gone before a pipeline makes new ones, unless someone still looks at them."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

PLAIN_GRAD: Any = torch.Tensor.grad
LOG = logging.getLogger(f"lightning_par.{__name__}")  # other loggers hear only what one microbatch says


class Unit(nn.Module):
    """Says at every call that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        # What it reaches is held from step to step, and what counts its calls has the batch whole.
        LOG.info("it runs")
        y: Tensor = self.linear(x)
        return y


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(2))

    def training_step(self, batch: Tensor) -> Tensor:
        for unit in self.units:
            batch = unit(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Found(logging.Handler):
    """Counts, where a unit runs, how many of the gradients that there were after the last step are there still."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.before: list[weakref.ref[Tensor]] = []

    def emit(self, record: logging.LogRecord) -> None:
        gc.collect()
        self.numbers.append(sum(grad() is not None for grad in self.before))


class Watching(L.Callback):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(all(p.grad is not None for p in pl_module.parameters()))


class Keeping(Net):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class Wrapper:
    """Passes for an optimizer by its `__class__`, and has the methods of the one within as attributes, as LARS is often
    written."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.within, self.zero_grad = optimizer, optimizer.zero_grad
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @property
    def __class__(self) -> Any:
        return torch.optim.Optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["within"], name)

    def step(self, closure: Any = None) -> Any:
        return self.within.step(closure)


class Wrapped(Net):
    def configure_optimizers(self) -> Any:
        return Wrapper(super().configure_optimizers())


class NeverZeroed(Net):
    """The optimizer's own `zero_grad` does nothing, so that gradients add up from step to step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return optimizer


KINDS = {"kept": Keeping, "wrapped": Wrapped, "never zeroed": NeverZeroed}


def found(kind: str) -> tuple[list[int], list[bool]]:
    """For each microbatch of the last step, the old gradients that this rank's unit found; and what a callback saw."""
    L.seed_everything(0, verbose=False)
    module, watching = KINDS.get(kind, Net)(), Watching()
    counts: list[int] = []
    noted = Found()

    class Last(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            noted.numbers.clear()
            grads = [PLAIN_GRAD.__get__(p) for p in pl_module.parameters()]
            noted.before = [weakref.ref(grad) for grad in grads if grad is not None]

        def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
            counts[:] = noted.numbers

    trainer = L.Trainer(
        strategy=PipelineParallelStrategy(microbatches=2, stages=["units.1"]), accelerator="cpu", devices=2,
        max_epochs=1, limit_train_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Last(), *[watching] * (kind == "watched")],
        accumulate_grad_batches=2 if kind == "accumulated" else 1,
    )  # fmt: skip
    LOG.setLevel(logging.INFO)
    LOG.addHandler(noted)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))  # type: ignore[arg-type]
    LOG.removeHandler(noted)
    return counts, watching.seen


@long("plain", "never zeroed")
@slow("accumulated", "kept")
@pytest.mark.parametrize("kind", ["plain", "watched", "kept", "accumulated", "wrapped", "never zeroed"])
def test_old_gradients_make_room_where_nobody_looks_at_them(pool: Pool, kind: str) -> None:
    for counts, seen in pool.run(2, found, kind):
        assert counts == ([0, 0] if kind in ("plain", "wrapped") else [2, 2])
        assert seen == ([False, True] if kind == "watched" else [])
