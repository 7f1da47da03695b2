"""What a step's own code does to modules that are placed as a whole, beside calling them: `self.loss.compute(x)`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from lightning_par.pipeline.watch import users_within
from lightning_par.watch.snapshot import Snapshot

if TYPE_CHECKING:
    from lightning_par.pipeline.analysis import Analysis


class UnitState:
    """What units hold before a trial run of a step.

    Args:
        module: that the trial runs.
        units: their FQNs.
        packages: that count as the user's.
    """

    def __init__(self, module: nn.Module, units: Collection[str], packages: frozenset[str]) -> None:
        found = {path: users_within(module.get_submodule(path), path, packages) for path in units}
        self._units = [path for path, inner in found.items() if inner]
        self._before = Snapshot([], packages)
        self._own = self._before.add_units([pair for inner in found.values() for pair in inner])

    def outer(self, run: Analysis) -> frozenset[str]:
        """The units that ``run``, which has ended, changed by other code than their own, or that it never called."""
        called = {path for path, _ in run.units}
        cells = (self._before.cells[name] for name in self._own)
        changed = [cell.name for cell in cells if cell.change_unlent() is not None]
        return frozenset(
            path
            for path in self._units
            if path not in called
            or path not in run.keeping
            and any(name.startswith((f"{path}.", f"{path}[")) or name == path for name in changed)
        )
