"""What Lightning hangs on a LightningModule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_par.private.compiler import Compiler, as_written

if TYPE_CHECKING:
    from lightning_par.strategies.namespace import Namespace

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""What Lightning compiles beside ``forward``."""

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


def give_device(module: Any, device: torch.device) -> None:
    """Let each LightningModule within ``module`` say that it is on ``device``, where weights are taken to lie; the
    public name follows real moves alone."""
    for one in module.modules():
        if "_device" in vars(one):
            vars(one)["_device"] = device


def uncompile(module: Any, namespace: Namespace) -> Compiler | None:
    """Undo what a Trainer did to the LightningModule of a ``torch.compile(module)`` that it was given.

    Returns:
        What it was compiled by, None where it was not. Lightning's public way back does not tell; and where a module
        was given twice, to steps that are compiled still.
    """
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return None
    compiler: Compiler = context["dynamo_ctx"]
    namespace.from_pytorch("utilities.compile", "to_uncompiled")(module)
    for name in ("forward", *STEPS):
        own = as_written(vars(module).pop(name))
        if own != getattr(module, name):  # the user had replaced it before
            vars(module)[name] = own
    return compiler


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Call the user's ``on_before_batch_transfer``, of the LightningModule or of the datamodule, whichever Lightning
    would choose; the choice has no public name."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)
