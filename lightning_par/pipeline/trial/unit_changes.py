"""What units change in Python objects, found by a look at all that they reach before and after each of their calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_par.pipeline.effects.unit_effects import Left, Sight, show
from lightning_par.pipeline.effects.unit_reach import LENT, state_of
from lightning_par.python_state.changes import as_it_is, stored_by
from lightning_par.python_state.snapshot import Snapshot, plainly


class UnitChanges:
    """Of the units in a recorded run of a step.

    Args:
        module: the copy that runs.
        packages: that count as the user's.
        looked: whether units that change something are looked for.
        sight: in a run in which units have what they will have of it.

    Attributes:
        keeping: the units that change Python state, and what they change.
        lent: those that change modules which they are given.
        aftereffects: the units that change any object, their arguments too, and which.
        made: what they store, by the id of what holds it, and where.
        left: in a run by ``sight``, what they left.
    """

    def __init__(
        self, module: nn.Module, packages: frozenset[str], looked: bool = False, sight: Sight | None = None
    ) -> None:
        self.looked, self.sight = looked, sight
        self.keeping: dict[str, str] = {}
        self.lent: dict[str, str] = {}
        self.aftereffects: dict[str, str] = {}
        self.made: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self.left: list[Left] = []
        self._module, self._packages = module, packages
        self._lasting: set[int] | None = None  # ids of the objects that it holds

    @contextmanager
    def noted(self, event: int, path: str, module: nn.Module, lent: Sequence[nn.Module], given: Any) -> Iterator[None]:
        """The unit ``path`` runs inside, as ``event``: it is noted if that changes Python state.

        Args:
            event: the call.
            path: the unit's.
            module: the unit.
            lent: modules that it is given.
            given: all that it is given.
        """
        bare = self._state(path, module, lent) if self.sight is not None or path not in self.keeping else None
        if bare is None:
            yield
            return
        reached = set(bare.cells)
        bare.add(f"what {path!r} is given", given)
        before = bare
        if self.sight is not None:
            bare.copy_tensors()
            show((x for x in self.left if self.sight.sees(event, x)), {id(cell.owner) for cell in bare.cells.values()})
            before = self._state(path, module, lent) or bare
            before.add(f"what {path!r} is given", given)
            before.copy_tensors()
        yield
        left = self._left(event, path, before, reached)
        if self.sight is not None:
            with plainly():
                before.restore()
                bare.restore()
            if path in self.sight.units:
                self.left += left
            else:
                show(left, {id(one.cell.owner) for one in left})

    def _state(self, path: str, module: nn.Module, lent: Sequence[nn.Module]) -> Snapshot | None:
        return state_of(module, path, self._packages, lent) if self.looked else None

    def _left(self, event: int, path: str, before: Snapshot, reached: set[str]) -> list[Left]:
        """What the unit has changed, of which it ``reached`` these objects without its arguments."""
        left = []
        with plainly():
            changes = [(name, x, None if x.fixed else x.change_unlent()) for name, x in before.cells.items()]
        for name, cell, change in changes:
            if change is not None:
                lasts = name in reached or self._lasts(cell.owner)
                left.append(Left(event, path, cell, as_it_is(change), lasts))
                self._note(left[-1], name not in reached)
        return left

    def _note(self, left: Left, given: bool) -> None:
        path, cell = left.path, left.cell
        self.aftereffects.setdefault(path, cell.name)
        if not left.lasts:
            return
        self.keeping.setdefault(path, cell.name)
        if given or cell.name.startswith(LENT):
            self.lent.setdefault(path, cell.name)
        self.made.update(((id(cell.owner), key), (cell.owner, x)) for key, x in stored_by(left.change).items())

    def _lasts(self, owner: Any) -> bool:
        """Whether the module holds an object that a unit was given."""
        if self._lasting is None:
            modules = [(path or "self", m) for path, m in self._module.named_modules()]
            self._lasting = {id(x) for x in Snapshot(modules, self._packages).objects.values()}
        return id(owner) in self._lasting
