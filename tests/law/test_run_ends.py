"""After a run nothing that it made is alive: not its module, its optimizer, its axes, nor anything of its state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.mesh.axis import Axis
from lightning_par.sharded.run_state import RunState
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.law.test_two_strategies import LAYOUTS

Known = dict[str, weakref.ref[Any]]


class Looks(Callback):
    """Weak references to what there is in the last step."""

    def __init__(self) -> None:
        self.known: Known = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        strategy: Any = trainer.strategy
        found = {
            "module": pl_module, "layer": next(iter(pl_module.children())), "strategy": strategy, "trainer": trainer,
            "optimizer": trainer.optimizers[0],
            "state of the run": RunState.current,
            **{f"part {number}": part for number, part in enumerate(strategy.parts)},
        }  # fmt: skip
        gc.collect()
        for x in gc.get_objects():
            if isinstance(x, Axis):
                found[f"{x} {id(x)}"] = x
        self.known = {name: weakref.ref(x) for name, x in found.items()}


def _fit(layout: dict[str, Any]) -> tuple[Trainer, Any, Known]:
    torch.manual_seed(0)
    looks, case = Looks(), MODELS["gpt"]
    module = case.module()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**layout), max_steps=3, callbacks=[looks],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(case.data(0) * 2, batch_size=4))  # type: ignore[arg-type]
    # While a run goes on no weight may have a weak reference, or it could not be made whole.
    looks.known["weight"] = weakref.ref(next(module.parameters()))
    return trainer, module, looks.known


def _alive(known: Known, but: Sequence[str] = ()) -> dict[str, list[str]]:
    """What is alive, and what holds it."""
    gc.collect()
    found = {name: x() for name, x in known.items() if name not in but and x() is not None}
    return {name: [str(type(holder)) for holder in gc.get_referrers(x)] for name, x in found.items()}


def _after(layout: dict[str, Any]) -> list[dict[str, list[str]]]:
    trainer, module, known = _fit(layout)
    assert any("Axis(" in name for name in known)
    del trainer
    module.trainer = None  # the user goes on with the model
    kept = _alive(known, but=("module", "layer", "weight"))
    del module
    return [kept, _alive(known)]


@slow("shard_residual", "placement", "sequence", "tensor")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ulysses"])
def test_nothing_of_a_run_outlives_it(pool: Pool, layout: str) -> None:
    assert pool.run(2, _after, LAYOUTS[layout]) == [[{}, {}]] * 2
