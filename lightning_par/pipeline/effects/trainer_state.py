"""What a step may change of its trainer: attributes, the settings of optimizers, and, where its code names them,
schedules, the user's datasets, callbacks and data module."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_par.python_state.cells.mappings import MappingCell
from lightning_par.python_state.found import Found
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.trial.held_by_trainer import named_of_trainer

NAME = "self.trainer"
_SCHEDULES = frozenset(("lr_schedulers", "lr_scheduler_configs"))


class SettingsCell(MappingCell):
    """The settings of a param group, the counts of a schedule: new ones come at each step, and hold nothing."""

    def renew(self, atoms: Collection[Any]) -> bool:
        return super().renew({*atoms, tuple, list, dict})


class TrainerCell(MappingCell):
    """The attributes of a trainer: those that are skipped are its own, and what it puts there is nobody's business."""

    def renew(self, atoms: Collection[Any]) -> bool:
        now = self._now()
        self.before = {key: now.get(key, x) if self._skips(key) else x for key, x in self.before.items()}
        return super().renew(atoms)


def look_at_trainer(snapshot: Snapshot, trainer: Any, packages: frozenset[str]) -> None:
    """Add them to the state that the step of the trainer's module reaches.

    Args:
        snapshot: of that.
        trainer: of either of Lightning's packages.
        packages: installed packages that count as the user's.
    """
    held = vars(trainer)
    inner = [name for name in held if name.startswith("_")]  # the library's, which runs change
    snapshot.cells[NAME] = TrainerCell(NAME, trainer, held, inner)
    for n, optimizer in enumerate(trainer.optimizers):
        for m, group in enumerate(optimizer.param_groups):
            _look_at(snapshot, SettingsCell(f"{NAME}.optimizers[{n}].param_groups[{m}]", optimizer, group, ["params"]))
    for n, config in enumerate(() if _SCHEDULES.isdisjoint(snapshot.words) else trainer.lr_scheduler_configs):
        for m, schedule in enumerate(_schedules(config.scheduler)):
            _look_at(
                snapshot, SettingsCell(f"{NAME}.lr_schedulers[{n}] ({m})", schedule, vars(schedule), ["optimizer"])
            )
    for name, held_there in named_of_trainer(trainer, snapshot.words, packages):
        snapshot.add(f"{NAME}.{name}", held_there)


def _look_at(snapshot: Snapshot, cell: MappingCell) -> None:
    snapshot.cells[cell.name] = cell
    for key, x in cell.items():
        if isinstance(x, Tensor):  # as a rate may be
            snapshot.tensor(Found(cell.place(key), x, cell, key))


def _schedules(schedule: Any) -> Iterator[Any]:
    """A schedule, and those that it is made of."""
    yield schedule
    for value in vars(schedule).values():
        for x in value if isinstance(value, (list, tuple)) else ():
            if isinstance(x, LRScheduler):
                yield from _schedules(x)
