"""What a run does to a LightningModule before its first step: it has a Trainer, is set up, and adds its modules."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_par.private.lightning_modules import give_trainer, trainer_of
from lightning_par.private.loaders import attach_loader
from lightning_par.strategies.namespace import Namespace, namespace_of
from lightning_par.trial.module_copy import TrainerView


def set_up(module: Any, batch: Any, calls_setup: bool = True) -> None:
    """Call `setup` and `configure_model`, in place; a module that a Trainer has had before was set up by it.

    Args:
        module: a LightningModule, or any other, of which there is nothing to call.
        batch: what the Trainer's loader gives.
        calls_setup: False where `setup` is left out.

    Example::

        module = MyModule()
        set_up(module, batch)
        assert module.trainer.max_epochs == 1000
    """
    if hasattr(module, "setup") and hasattr(module, "training_step") and trainer_of(module) is None:
        _attach(module, batch, namespace_of(type(module)))
        if calls_setup:
            module.setup("fit")
    configure = getattr(module, "configure_model", None)
    if callable(configure):
        configure()


def _attach(module: Any, batch: Any, namespace: Namespace) -> None:
    """Give it a Trainer with Lightning's defaults, to be read: one device, a thousand epochs of one batch."""
    lightning, log = import_module(namespace.pytorch), logging.getLogger(namespace.pytorch)
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it has to say is about no run of the user's
        log.setLevel(logging.ERROR)
        try:
            trainer = lightning.Trainer(
                accelerator="cpu", devices=1, logger=namespace.from_pytorch("loggers.logger", "DummyLogger")(),
                max_epochs=1000, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
        finally:
            log.setLevel(level)
    trainer.strategy.connect(module)
    trainer.state.fn = namespace.from_pytorch("trainer.states", "TrainerFn").FITTING
    trainer.state.status = namespace.from_pytorch("trainer.states", "TrainerStatus").RUNNING
    trainer.training = True
    attach_loader(trainer, module, DataLoader(_One(batch), batch_size=None))
    give_trainer(module, TrainerView(trainer))


class _One(Dataset[Any]):
    """A data set of one batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Any:
        return self.batch
