"""Whose question a property answers: that of user code which makes data, optimizers or values, or another's.

Ranks that share a model are one device to that code: as one, they take the same share of the data.
"""

from __future__ import annotations

import sys

from lightning_par.namespace import Namespace

# Hooks of a LightningModule or LightningDataModule in which numbers of ranks go into results.
HOOKS = frozenset(
    """
training_step validation_step test_step predict_step optimizer_step lr_scheduler_step configure_gradient_clipping
setup configure_model configure_optimizers train_dataloader val_dataloader test_dataloader predict_dataloader
on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer
""".split()
)


def in_users_hook(namespace: Namespace) -> bool:
    """Whether one of `HOOKS` is running, as a method of a LightningModule or LightningDataModule.

    It is read from the stack, since Lightning tells a strategy of some hooks only, and of none that makes data.
    """
    owners = tuple(namespace.from_pytorch("core", name) for name in ("LightningModule", "LightningDataModule"))
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in HOOKS and code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), owners):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
