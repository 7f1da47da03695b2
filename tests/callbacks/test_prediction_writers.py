"""Callbacks that act on one rank for all, or that no rank may run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder

from lightning_par.callbacks.prediction_writers import refuse_batch_size_finder
from lightning_par.strategies.namespace import LIGHTNING


def test_a_batch_size_finder_that_lightning_skips_is_not_refused() -> None:
    world: Any = SimpleNamespace(size=2)
    for fast in (True, False):
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, fast_dev_run=fast, callbacks=BatchSizeFinder())
        if fast:
            refuse_batch_size_finder(trainer, world, LIGHTNING)
        else:
            with pytest.raises(ValueError, match="run until memory is short"):
                refuse_batch_size_finder(trainer, world, LIGHTNING)
