"""What a step's own code does to modules that are placed as a whole, beside calling them: `self.loss.compute(x)`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from lightning_par.pipeline.effects.unit_holdings import UnitHoldings
from lightning_par.pipeline.effects.unit_reach import is_within, users_within
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.iterators import IteratorCell
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.sharded.patches.module_attributes import hearing_assignments

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


class UnitState:
    """What units hold before a trial run of a step, and between its calls of them.

    It looks at all of that, tensors included, and hears each assignment, for which no step has time: a dry run looks at
    plain values and at the versions of dicts (`lightning_par.pipeline.trial.code_attributes.Attributes`).

    Args:
        module: that the trial runs.
        units: their FQNs.
        packages: that count as the user's.
    """

    def __init__(self, module: nn.Module, units: Collection[str], packages: frozenset[str]) -> None:
        found = {path: users_within(module.get_submodule(path), path, packages) for path in units}
        self._module, self._packages, self._paths = module, packages, units
        self.holdings = UnitHoldings(module, units)
        self._units = {path: inner for path, inner in found.items() if inner}
        before = Snapshot([], packages)
        own = before.add_units([pair for inner in self._units.values() for pair in inner])
        self._before = {path: [before.cells[name] for name in own if is_within(name, [path])] for path in self._units}
        self._last = self._before.copy()  # what each holds since its last call
        self._moved: dict[str, list[Cell]] = {}  # what code outside of a unit changed
        self._assigned: set[str] = set()  # the units on whose modules it assigned anything, as `None` where that was

    @contextmanager
    def listening(self, run: Analysis) -> Iterator[None]:
        """``run`` runs inside: what the step's own code assigns to attributes of units is noted."""
        owners = {id(m): path for path in self._paths for m in self._module.get_submodule(path).modules()}

        def assigned(module: nn.Module, name: str) -> None:
            if id(module) in owners and not run.depth and name != "training":
                self._assigned.add(owners[id(module)])
                self.holdings.assigned(module, name)

        with hearing_assignments(assigned):
            yield

    @contextmanager
    def call(self, path: str, keeping: Collection[str]) -> Iterator[None]:
        """The unit ``path`` runs inside, which is among ``keeping`` afterwards if it changes anything."""
        self._compare(path)
        with self.holdings.call(path):
            yield
        if path in keeping and path in self._units:
            now = Snapshot([], self._packages, code=False, hooks=False)
            self._last[path] = [now.cells[name] for name in now.add_units(self._units[path]) if is_within(name, [path])]

    def _compare(self, path: str) -> None:
        """Note where the unit holds something else than before."""
        changed = [cell for cell in self._last.get(path, ()) if cell.change_unlent() is not None]
        self._moved.setdefault(path, []).extend(changed)

    def outer(self, run: Analysis) -> frozenset[str]:
        """The units that ``run``, which has ended, changed by other code than their own, or that it never called.

        What it set back counts, too: a stage's run may end before it comes to that.
        """
        called = {path for path, _ in run.units}
        changed = {path for path, cells in self._before.items() if any(x.change_unlent() is not None for x in cells)}
        changed |= self.holdings.changed()
        # a later step may ask an iterator, which can't be put back unless it is lent
        changed |= {path for path, cells in self._before.items() if any(isinstance(x, IteratorCell) for x in cells)}
        return frozenset(self._units.keys() - called | (changed | self._assigned) - run.changes.keeping.keys())

    def resets(self, run: Analysis) -> frozenset[str]:
        """The units of ``run``, which has ended, that keep something, and whose state code outside changes, too."""
        keeping = run.changes.keeping
        for path in keeping:
            self._compare(path)
        return frozenset(
            path for path in keeping if path in self._assigned or self._has_alone(path, self._moved.get(path, ()))
        )

    def _has_alone(self, path: str, cells: Collection[Cell]) -> bool:
        """Whether nothing but the unit holds one of ``cells``."""
        if not cells:
            return False
        inner = {id(m) for m in self._module.get_submodule(path).modules()}
        named = [(name or "self", m) for name, m in self._module.named_modules() if id(m) not in inner]
        held = Snapshot(named, self._packages, dict.fromkeys(inner, path), code=False).names
        return any(id(cell.owner) not in held or id(cell.owner) in inner for cell in cells)
