"""Python state around a trial run, which leaves it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from lightning_par.private.lightning_modules import trainer_of
from lightning_par.python_state.locked_arrays import reading
from lightning_par.python_state.registered_hooks import HookHolders, HooksCell
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.spare_tensors import Spares
from lightning_par.python_state.user_code import packages_of
from lightning_par.trial.held_by_trainer import named_of_trainer


@contextlib.contextmanager
def kept(module: nn.Module, batch: Any = None, as_is: Collection[int] = (), is_copy: bool = True) -> Iterator[Snapshot]:
    """Whatever a trial run of a copy of ``module`` does to Python's state, nothing is left of it.

    Args:
        module: what its copy shares with it, and what its code names, is put back.
        batch: put back, too.
        as_is: ids of tensors that the trial may change.
        is_copy: False where the trial runs ``module`` itself, whose tensors are put back, too.

    Example::

        with kept(module, batch):
            copy.deepcopy(module).training_step(batch, 0)
    """
    modules = [(f"self.{name}" if name else "self", m) for name, m in module.named_modules()]
    state = Snapshot(modules, packages_of(module))
    state.add("batch", batch)
    trainer = trainer_of(module)
    for name, held in () if trainer is None else named_of_trainer(trainer, state.words, packages_of(module)):
        state.add(f"self.trainer.{name}", held)  # what these hold, a copy of the trainer shares
    state.cells[HooksCell.NAME] = HooksCell(HookHolders(module))  # a closure removes the module's own
    state.lend(Spares(), as_is, modules=not is_copy)
    try:
        with reading([state]):
            yield state
    finally:
        state.restore()
