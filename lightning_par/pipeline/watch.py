"""What a run of the user's step may change besides computing: watched, undone, or told.

A step runs several times on every rank of a pipeline, and counts once. See `lightning_par.pipeline.effects` for what
becomes of the run that counts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_par import private
from lightning_par.pipeline.effects import Effects
from lightning_par.pipeline.metrics import Around, StandIns, calling
from lightning_par.pipeline.outputs import Recorder, recorded, silent
from lightning_par.pipeline.speech import hushed, speaking
from lightning_par.pipeline.step import Step
from lightning_par.pipeline.structure import tensors_in
from lightning_par.watch.cells import Cell
from lightning_par.watch.changes import Change, MappingChange
from lightning_par.watch.reach import ATOMS
from lightning_par.watch.snapshot import Snapshot, kept, reading, too_large
from lightning_par.watch.spares import Spares
from lightning_par.watch.users import packages_of

T = TypeVar("T")


class Watch:
    """The Python state that a step reaches outside units, so that a run of it can be undone, or told.

    Args:
        lightning_module: whose step is run.
        modules: the container-level modules by FQN, ``lightning_module`` itself (``""``) and metrics included.
        around: called for each outermost call of a metric's ``forward``, ``update`` or ``compute`` as ``around(name,
            metric, call, args, kwargs)``; what it returns is the call's result. ``call`` is the metric's own method in
            a run that counts, and gives a value of the same structure, without touching the metric, in one that
            does not.

    Example::

        watch = Watch(module, [("", module)])
        with watch.undone(batch):
            module.training_step(batch, 0)
        with watch.told(batch) as effects:
            effects.result = module.training_step(batch, 0)
        effects = effects.travel(axis, source=axis.size - 1, objects=watch.objects(batch))
        apply(effects, module, watch, batch, show=axis.rank == 0)
    """

    def __init__(
        self, lightning_module: Any, modules: Sequence[tuple[str, nn.Module]], around: Around | None = None
    ) -> None:
        self.lightning_module = lightning_module
        self.modules = [(f"self.{fqn}" if fqn else "self", module) for fqn, module in modules]
        self.around = around
        self.made: dict[tuple[str, Any], Any] = {}  # what this rank's last run that was asked to `keep` stored anew
        containers = {id(module) for _, module in modules}
        named = lightning_module.named_modules()
        self._units = {id(m): f"self.{fqn}" for fqn, m in named if id(m) not in containers}
        self._packages = packages_of(lightning_module)
        self._classes: dict[int, type] = {}  # of objects in batches
        self._snapshot: Snapshot | None = None
        self._stand_ins = StandIns()
        self._spares, self._spares_of_batch = Spares(), Spares()
        self._inside: list[tuple[str, Change]] = []  # what hooks of units changed in the run that is on

    @contextlib.contextmanager
    def undone(self, batch: Any = None, keep: bool = False) -> Iterator[None]:
        """Whatever the run inside does to the state is undone; its logs, prints and metric updates do nothing.

        Args:
            batch: what the step is given.
            keep: whether `made` gets what the run stored.

        Raises:
            RuntimeError: the run changed something in place that is too large to be copied.
        """
        state = self.snapshot()
        with self._lent(state, batch, keep=keep) as refused:
            with silent(self.lightning_module), calling(state.metrics, self.around, self._stand_ins.call):
                yield
        if refused:
            raise RuntimeError(" ".join(refused))

    @contextlib.contextmanager
    def told(self, batch: Any = None, whole: bool = True) -> Iterator[Effects]:
        """The run inside counts: afterwards the `Effects` hold what it did, and the state is put back here, too.

        Args:
            batch: what the step is given.
            whole: whether what becomes of the batch counts; a part's does not.
        """
        state, effects = self.snapshot(), Effects()
        recorder = Recorder(self.lightning_module, effects.logs, effects.said, state.names)
        with self._lent(state, batch, effects, whole) as refused:
            with recorded(self.lightning_module, recorder), calling(state.metrics, self.around, None):
                yield effects
        effects.refused += refused

    @contextlib.contextmanager
    def _lent(
        self, state: Snapshot, batch: Any, effects: Effects | None = None, whole: bool = True, keep: bool = False
    ) -> Iterator[list[str]]:
        """Inside a run may change all that ``state`` knows, and the batch; gives what it must not have done."""
        plain = type(batch) is Tensor or type(batch) is tuple and all(type(x) is Tensor for x in batch)
        given = None if plain and effects is None else self._of_batch(state, batch)
        as_is = {id(x) for x in tensors_in(batch)}
        refused: list[str] = []
        state.lend(self._spares, as_is)
        if given is not None:
            given.lend(self._spares_of_batch, as_is)
        held = [x for x in (state, given) if x is not None]
        try:
            with reading([name for x in held for name in x.locked()]):
                yield refused
            if keep:
                self.made = _made([x.changes() for x in held])
            if effects is not None:
                _tell(effects, state)
                if given is not None and whole:
                    _tell(effects, given)
        finally:
            overwritten = [place for x in held for place in x.restore()]
            self._keep_inside(state)
        if overwritten:
            refused.append(too_large(overwritten))

    @contextlib.contextmanager
    def inside(self, unit: nn.Module, prints: bool) -> Iterator[None]:
        """A unit runs inside, on this rank alone: what its hooks store stays here, though the run be undone.

        Args:
            unit: the unit.
            prints: whether what it prints and tells Python's loggers is said.
        """
        with speaking() if prints else hushed():
            if not any(private.has_hooks(module) for module in unit.modules()):
                yield
                return
            snapshot = self._walked()
            yield
        changes = [(name, cell.change_unlent()) for name, cell in snapshot.cells.items() if not cell.fixed]
        self._inside += [(name, change) for name, change in changes if change is not None]
        snapshot.restore()

    def _keep_inside(self, state: Snapshot) -> None:
        changes, self._inside = self._inside, []
        for name, change in changes:
            if name in state.cells:
                state.cells[name].apply(change)

    def snapshot(self) -> Snapshot:
        """What the modules hold now, the same as before if they still hold it."""
        if self._snapshot is None or not self._snapshot.renew():
            self._snapshot = None  # what it alone holds is let go
            self._snapshot = self._walked()
        return self._snapshot

    def settle(self, changed: Iterable[str]) -> None:
        """The objects of these names have changed for good: what they held is let go."""
        self.made = {}
        cells = {} if self._snapshot is None else self._snapshot.cells
        if not all(cells[name].renew(ATOMS) for name in changed if name in cells):
            self._snapshot = None

    def _walked(self) -> Snapshot:
        snapshot = Snapshot(self.modules, self._packages, self._units)
        for kind in self._classes.values():
            snapshot.add(kind.__qualname__, kind)
        return snapshot

    def _of_batch(self, state: Snapshot, batch: Any) -> Snapshot | None:
        """What the batch holds, None if that is nothing but tensors."""
        if batch is None:
            return None
        given = Snapshot([], self._packages, state.names, code=False)
        given.add("batch", batch)
        new = {id(kind): kind for kind in given.classes if id(kind) not in self._classes}
        for kind in new.values():
            state.add(kind.__qualname__, kind)
        self._classes.update(new)
        return given

    def cells(self, batch: Any = None) -> dict[str, Cell]:
        """Everything that may change, by name."""
        state = self.snapshot()
        given = self._of_batch(state, batch)
        return state.cells if given is None else {**state.cells, **given.cells}

    def present(self, batch: Any = None) -> dict[tuple[str, Any], Any]:
        """What is there now, by the name of the object that holds it and where in it."""
        return {(name, key): value for name, cell in self.cells(batch).items() for key, value in cell.items()}

    def objects(self, batch: Any = None) -> dict[str, Any]:
        """Everything that has a name, the same on all ranks."""
        state = self.snapshot()
        given = self._of_batch(state, batch)
        return state.objects if given is None else {**state.objects, **given.objects}


def untraced(trial: Callable[..., T]) -> Callable[..., T]:
    """``trial`` runs a step, its first argument, on a copy of the module; whatever that shares is put back."""

    @functools.wraps(trial)
    def run(step: Step, *args: Any, **kwargs: Any) -> T:
        with kept(step.module, step.batch, {id(x) for x in tensors_in(step.batch)}):
            return trial(step, *args, **kwargs)

    return run


def _tell(effects: Effects, state: Snapshot) -> None:
    for name, change in state.changes().items():
        cell = state.cells[name]
        if cell.fixed is None:
            effects.state[name] = change
            effects.places[name] = cell.dotted
            continue
        mapping = isinstance(change, MappingChange)
        places = ", ".join(map(cell.place, [*change.entries, *change.deleted])) if mapping else name
        effects.refused.append(cell.fixed.format(places=places))
    effects.names.update(state.names)
    effects.names.update(state.stand_ins())
    effects.kept.append((state, [cell.lent for cell in state.cells.values() if cell.lent]))


def _made(changes: Iterable[dict[str, Change]]) -> dict[tuple[str, Any], Any]:
    """What was stored anew, by the name of the object that holds it and where in it."""
    found: dict[tuple[str, Any], Any] = {}
    for name, change in ((name, change) for each in changes for name, change in each.items()):
        entries = getattr(change, "entries", None) or dict(enumerate(getattr(change, "rest", ())))
        found.update(((name, key), value) for key, value in entries.items())
    return found
