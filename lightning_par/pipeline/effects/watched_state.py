"""The Python state that a step reaches outside units: what there is, what of it has moved, and how to put it back."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.trainer_state import look_at_trainer
from lightning_par.pipeline.effects.unit_reach import add_hooks, users_within
from lightning_par.pipeline.run.unit_calls import LocatedCall
from lightning_par.private.leaf_hooks import hooks_of
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.module_calls import get_call
from lightning_par.private.module_hooks import hooks_on, hooks_on_all
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.contents import CacheCell
from lightning_par.python_state.locked_arrays import not_copied
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.registered_hooks import HookHolders, HooksCell
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.spare_tensors import Spares
from lightning_par.python_state.training_modes import ModesCell
from lightning_par.python_state.user_code import packages_of


class WatchedState:
    """What the user's step may change besides computing, looked at from step to step.

    Args:
        lightning_module: whose step is run.
        modules: the container-level modules by FQN, ``lightning_module`` itself (``""``) and metrics included.

    Attributes:
        units: the FQNs of the modules that are placed as a whole.
        packages: that count as the user's.
    """

    def __init__(self, lightning_module: Any, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.lightning_module = lightning_module
        self.modules = [(f"self.{fqn}" if fqn else "self", module) for fqn, module in modules]
        containers = {id(module) for _, module in modules}
        named = lightning_module.named_modules()
        self._units = {id(m): f"self.{fqn}" for fqn, m in named if id(m) not in containers}
        self.packages = packages_of(lightning_module)
        self._classes: dict[int, type] = {}  # of objects in batches
        self._snapshot: Snapshot | None = None
        self._spares = Spares()
        self.units = [path for path, m in lightning_module.named_modules() if isinstance(get_call(m), LocatedCall)]
        self._inner: list[tuple[str, nn.Module]] = []
        self._outer: list[tuple[str, nn.Module]] = []  # modules in units whose state the step itself changes
        self._holders = HookHolders(lightning_module)
        self._watched: tuple[Snapshot | None, int, dict[int, str]] = None, 0, {}  # see `watched`
        self._told_of_many = False
        self._widened: tuple[Any, ...] = ()  # units and hooks whose code is looked at, too

    def snapshot(self) -> Snapshot:
        """What the modules hold now, the same as before if they still hold it."""
        if self._snapshot is None or not self._snapshot.renew():
            self._snapshot = None  # what it alone holds is let go
            self._snapshot = self._walked()
        return self._snapshot

    def begin(self) -> None:
        """A step begins. Code that ran since the last one may have written into tensors by ways that their versions
        don't count, as `.data` and arrays of numpy: copies of them are made anew."""
        self._spares.forget()

    def moves(self) -> set[tuple[str, Any, int]]:
        """What is other than at the last `snapshot`: see `Snapshot.moves`."""
        return set() if self._snapshot is None else self._snapshot.moves()

    def look(self) -> None:
        """From now on `moves` tells what has changed, and `put_back` undoes it, up to `let_go`; nothing is lent."""
        self.snapshot().keep_tensors(self._spares)

    def put_back(self) -> None:
        """Undo what has changed since `look`.

        Raises:
            RuntimeError: something was changed in place that is too large to be copied.
        """
        state = self._snapshot
        overwritten = [] if state is None else state.restore()
        self.let_go()
        if overwritten:
            raise RuntimeError(not_copied(overwritten))

    def let_go(self) -> None:
        """What changes from now on stays."""
        if self._snapshot is not None:
            self._snapshot.let_tensors_go()

    def settle(self, changed: Iterable[str]) -> None:
        """The objects of these names have changed for good: what they held is let go."""
        if self._snapshot is not None and not self._snapshot.settle(changed):
            self._snapshot = None

    def widen(self, units: Collection[str]) -> None:
        """Look at what the code of these units and their hooks reaches, too; it is the same for all runs of a step."""
        inner = [m for path in sorted(units) for m in self._within(path)]
        found = (*units, *hooks_on_all(), *(hook for _, m in inner for hook in hooks_on(m)))
        if len(found) != len(self._widened) or any(a is not b and a != b for a, b in zip(found, self._widened)):
            self._widened, self._inner, self._snapshot = found, inner, None

    def take_in(self, units: Collection[str]) -> None:
        """From now on look at what these units hold, too: code outside of them changes it, and they don't."""
        found = {path: self.lightning_module.get_submodule(path) for path in sorted(units)}
        outer = [(f"self.{name}", m) for path, unit in found.items() for name, m in unit.named_modules(prefix=path)]
        if outer != self._outer:
            self._outer, self._snapshot = outer, None

    def with_unit(self, path: str) -> tuple[Snapshot, set[str]]:
        """What is there now, the unit's own attributes included, and the names of these."""
        inner = [(f"self.{name}", m) for name, m in self._within(path)]
        apart = {key: name for key, name in self._units.items() if all(key != id(m) for _, m in inner)}
        snapshot = self._walked(apart, hooks=False)
        own = set(snapshot.add_units(inner))
        return snapshot.compare_contents(), own

    def everything(self, parameters: bool = False, hooks: bool = False) -> tuple[Snapshot, set[str]]:
        """What is there now, within units, too, with all that hooks reach; and what units alone hold.

        Args:
            parameters: whether to look at hooks on parameters, too, which are off while the stages' backwards run.
            hooks: whether hooks that come and go are a change: ranks agree on these before the next step.
        """
        inner = [(f"self.{name}", m) for path in self.units for name, m in self._within(path)]
        within = {id(m) for _, m in inner}
        snapshot = self._walked({key: name for key, name in self._units.items() if key not in within}, hooks)
        own = set(snapshot.add_units(inner))
        for name, p in self.lightning_module.named_parameters() if parameters else ():
            for n, hook in enumerate(hook for hooks in hooks_of(p) for hook in hooks.values()):
                snapshot.add(f"hook {n} of {name}", hook)
        return snapshot.compare_contents(), own

    def reach_of_unit(self, path: str, module: nn.Module) -> Reach:
        """All that code within a unit reaches, but for what is watched beside the units."""
        reach = Reach(self.packages, self.watched())
        reach.add_modules((f"self.{name}", m) for name, m in module.named_modules(prefix=path))
        return reach

    def watched(self) -> dict[int, str]:
        """The names of all that is looked at, by id; the same dict until something comes or goes."""
        state = self._state
        if self._watched[0] is not state or self._watched[1] != state.turn:
            found = {key: x for key, x in state.names.items() if key not in self._units}
            self._watched = state, state.turn, found
        return self._watched[2]

    def names(self) -> dict[int, str]:
        """In a run, the names of what was there before it, by the ids of that and of what stands in for it."""
        return {} if self._snapshot is None else {**self._snapshot.names, **self._snapshot.stand_ins()}

    def original(self, stand_in: Tensor) -> Tensor | None:
        """In a run: what ``stand_in`` stands in for."""
        return None if self._snapshot is None else self._snapshot.original(stand_in)

    def objects(self, batch: Any = None) -> dict[str, Any]:
        """Everything that has a name, the same on all ranks."""
        state = self.snapshot()
        given = self._of_batch(state, batch)
        return state.objects if given is None else {**state.objects, **given.objects}

    def present(self, batch: Any = None) -> dict[tuple[str, Any], Any]:
        """What is there now, by the name of the object that holds it and where in it."""
        return {(name, key): value for name, cell in self.cells(batch).items() for key, value in cell.items()}

    def cells(self, batch: Any = None) -> dict[str, Cell]:
        """Everything that may change, by name."""
        state = self.snapshot()
        given = self._of_batch(state, batch)
        return state.cells if given is None else {**state.cells, **given.cells}

    def held(self) -> list[Cell]:
        """In a run: what modules hold outside units, and what leads there."""
        return [cell for name, cell in self._state.cells.items() if name.startswith("self")]

    @property
    def hooks(self) -> HooksCell:
        """Those that hung when the run that is on began."""
        return cast(HooksCell, self._state.cells[HooksCell.NAME])

    def caches(self) -> list[Cell]:
        """What is watched of `functools.lru_cache`."""
        return [cell for cell in self._state.cells.values() if isinstance(cell, CacheCell)]

    @property
    def _state(self) -> Snapshot:
        """As `snapshot` gave it, if it was asked."""
        return self.snapshot() if self._snapshot is None else self._snapshot

    def _walked(self, apart: dict[int, str] | None = None, hooks: bool = True) -> Snapshot:
        apart, outer = self._units if apart is None else apart, {id(m) for _, m in self._outer}
        known = {id(m) for _, m in self.modules} | self._units.keys()
        late = [
            (f"self.{n}", m) for n, m in self.lightning_module.named_modules() if id(m) not in known
        ]  # on_fit_start
        modules, apart = [*self.modules, *late], {key: x for key, x in apart.items() if key not in outer}
        snapshot = Snapshot(modules, self.packages, apart)
        snapshot.add_units(self._outer)
        for kind in (*self._classes.values(), *(type(m) for _, m in self._inner)):
            snapshot.add(kind.__qualname__, kind)
        add_hooks(snapshot, self._inner)
        within = {name: m for name, m in self.lightning_module.named_modules() if id(m) in self._units}
        snapshot.cells[ModesCell.NAME] = ModesCell(within)
        trainer = trainer_of(self.lightning_module)
        if trainer is not None:
            look_at_trainer(snapshot, trainer, self.packages)
        if hooks:
            snapshot.cells[HooksCell.NAME] = HooksCell(self._holders)
        self._tell_of(snapshot.long.beyond)
        return snapshot

    def _tell_of(self, beyond: str | None) -> None:
        """Objects are too many to be looked at, from the one at ``beyond`` on."""
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if beyond is not None and not self._told_of_many and is_first:
            warnings.warn(
                f"What the step reaches holds too many objects to look at: {beyond} and others are left out. A "
                "pipeline runs a step several times and undoes what all runs but one have changed, which it can't do "
                "there. If the step changes them, keep what changes in a tensor or an array of the module's own, or "
                "change it in on_train_batch_end.",
                stacklevel=2,
            )
        self._told_of_many = beyond is not None or self._told_of_many

    def _within(self, path: str) -> list[tuple[str, nn.Module]]:
        return users_within(self.lightning_module.get_submodule(path), path, self.packages)

    def _of_batch(self, state: Snapshot, batch: Any) -> Snapshot | None:
        """What the batch holds, None if that is nothing but tensors."""
        if batch is None:
            return None
        given = Snapshot([], self.packages, state.names, code=False)
        given.add("batch", batch)
        new = {id(kind): kind for kind in given.classes if id(kind) not in self._classes}
        for kind in new.values():
            state.add(kind.__qualname__, kind)
        self._classes.update(new)
        return given
