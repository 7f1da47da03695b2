"""What Lightning hangs on a LightningModule."""

from __future__ import annotations

from typing import Any

ATTRIBUTES = frozenset("_trainer _fabric _fabric_optimizers _device_mesh _compiler_ctx _metric_attributes".split())
"""What a run sets there, which is no state of the user's."""

HPARAMS = "_hparams"
"""Where ``hparams`` is kept, by which an attribute of the instance is told from a property."""


def trainer_of(module: Any) -> Any:
    """The Trainer of a LightningModule, None where it has none: its public name raises then."""
    return vars(module).get("_trainer")


def give_trainer(module: Any, trainer: Any) -> None:
    """Let ``module.trainer`` be ``trainer``, whatever it is: the public name hands it on to modules within."""
    module.__dict__["_trainer"] = trainer


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Call the user's ``on_before_batch_transfer``, of the LightningModule or of the datamodule, whichever Lightning
    would choose; the choice has no public name."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)
