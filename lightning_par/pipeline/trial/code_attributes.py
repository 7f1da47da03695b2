"""What may lead the code within units another way than the batch does: plain values that it reaches, and the trainer's.

A step that is cut into microbatches was found to treat each sample by itself. What it does outside units is checked at
every step; within units it may begin to mix samples when someone sets a flag, or at some epoch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import compress
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.unit_reach import is_within
from lightning_par.pipeline.trial.deciding_numbers import Place, Question, deciding
from lightning_par.pipeline.trial.tensor_contents import TensorContents, Told
from lightning_par.private.dict_versions import version_of_dict
from lightning_par.private.modules import BUFFERS, PARAMETERS, buffers_of
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.mappings import BodyCell, MappingCell
from lightning_par.python_state.cells.names import PublicCell
from lightning_par.python_state.cells.sequences import SetCell, TupleCell
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.still import Still
from lightning_par.python_state.user_code import packages_of

_PLAIN = (bool, int, float, str, type(None))
_INNER = ("torch.", "lightning_par.", "builtins")
TENSORS = "the content of tensors"
"""Among what units go by: they read values of tensors that are no weights of theirs."""
_KNOWN = ATOMS | {Tensor, nn.Parameter}  # nothing is in them that could be set


def flags_among(said: Iterable[tuple[Any, Any]]) -> tuple[tuple[Any, Any], ...]:
    """Of what was set, by place, the words and flags."""
    return tuple((place, value) for place, value in said if isinstance(value, (bool, str, type(None))))


class Attributes:
    """Plain values that units reach, as code outside units sets them: on modules, in classes, globals, closures,
    in the environment.

    What a unit sets itself does not count: other ranks would not know. What small tensors hold, by which units may
    decide, the ranks tell one another before each step: one of them alone has the buffers of a layer.

    Args:
        module: the LightningModule.
        units: the FQNs of its units.

    Attributes:
        tensors: that units reach, beside weights.

    Example::

        attributes = Attributes(module, ["net"])
        module.net.warm = True
        assert attributes.changed_since(()) == (("net.warm", True),)
    """

    def __init__(self, module: nn.Module, units: Collection[str]) -> None:
        self._module, self._units = module, units
        self._changed: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self.tensors = TensorContents(self._held)
        self._environment = _environment()
        self._watched_dicts: dict[str, dict[str, Any]] = {}  # of modules in units, since `begin`
        self._writes: list[int] = []  # how often these had been written to then
        self._began: dict[int, tuple[Cell, Any]] | None = None  # what moved since `begin`, and what it held then
        self._look()
        # Whether something goes by other numbers, no trial run shows.
        self._watched = {place for cell in self._told.values() if watches_numbers(cell) for place, _ in _values(cell)}

    def changed_since(self, deciding: Collection[str]) -> tuple[tuple[str, Any], ...]:
        """What was set outside units since the run began; numbers that are no counts, and what small tensors hold,
        only if ``deciding``."""
        self._changed.update(self._renewed())
        if _environment() != self._environment or "os.environ" in self._changed:
            self._changed["os.environ"] = frozenset(os.environ.items())
        if TENSORS in deciding:
            self._changed.update(self.tensors.rewritten())
        return tuple(
            (place, value)
            for place, value in self._changed.items()
            if type(value) is not float or place in deciding or place not in self._watched
        )

    def hear(self, told: Iterable[Told]) -> None:
        """What each of the ranks has told of small `tensors`."""
        self._changed.update(self.tensors.hear(told))

    def begin(self) -> None:
        """A run of the step's own code begins, in which no unit runs: what it sets can be undone.

        A trial finds out more of that, slowly: `lightning_par.pipeline.effects.unit_state.UnitState`.
        """
        self._renewed()
        self._began, self._watched_dicts = {}, self._holders
        self._writes = [*map(version_of_dict, self._watched_dicts.values())]

    def put_back(self) -> frozenset[str]:
        """Undo what was set since `begin`, and nobody has undone; returns what held that."""
        moved = self._left()
        for cell, before in reversed(moved):
            cell.before = before
            cell.restore()
        self._began = None
        self._renewed()
        return frozenset(cell.name for cell, _ in moved)

    def left(self) -> frozenset[str]:
        """What holds something else than at `begin`, which nobody has undone."""
        return frozenset(cell.name for cell, _ in self._left())

    def left_within(self, known: Collection[int]) -> frozenset[str]:
        """Of `left`, the places within units, but for objects that are ``known``, by their ids, and modes."""
        left = [(cell, before) for cell, before in self._left() if id(cell.owner) not in known]
        places = (place for cell, before in left for place in _changed_places(cell, before))
        return frozenset(place for place in places if is_within(place, self._units))

    def _left(self) -> list[tuple[Cell, Any]]:
        return [(cell, before) for cell, before in self._began_with() if _holds_another(cell, before)]

    def touched(self) -> frozenset[str]:
        """Modules in units to which something was set since `begin`, though it may be what they held then."""
        now = [*map(version_of_dict, self._watched_dicts.values())]
        return (
            frozenset() if now == self._writes else frozenset(compress(self._watched_dicts, map(ne, now, self._writes)))
        )

    def _began_with(self) -> list[tuple[Cell, Any]]:
        known = self._began or {}
        moved = self._still.moved(self._cells)
        return [*known.values(), *((cell, cell.before) for cell in moved if id(cell) not in known)]

    def settle(self) -> None:
        """A step has run: what it set is known."""
        self._renewed()
        self.tensors.settle()

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors in attributes, and buffers of users' modules, by place."""
        yield from self._tensors
        for path, module in self._modules:
            yield from ((f"{path}.{name}", x) for name, x in buffers_of(module).items() if x is not None)

    def _renewed(self) -> dict[str, Any]:
        """What was set since the last look, by place; None where something is gone."""
        moved = self._still.moved(self._cells)
        if not moved:
            return {}
        before = self._values
        if self._began is not None:
            for cell in moved:
                self._began.setdefault(id(cell), (cell, cell.before))
        if all(cell.renew(_KNOWN) for cell in moved):
            self._note()
        else:
            self._look()
        set_now = {p: x for p, x in self._values.items() if p not in before or before[p] != x}
        return {**set_now, **dict.fromkeys(sorted(before.keys() - self._values.keys()))}

    def _look(self) -> None:
        self._told, self._still = _cells(self._module, self._units), Still()
        self._cells = {**self._told, **_own_cells(self._module, self._units)}
        held = ((name, cell.owner) for name, cell in self._cells.items() if _is_modules(cell))
        self._holders = {name: vars(owner) for name, owner in held}
        self._modules = [*_users_modules(self._module, self._units)]
        self._note()

    def _note(self) -> None:
        self._values = {place: value for cell in self._told.values() for place, value in _values(cell)}
        held = ((cell, key, x) for cell in self._told.values() for key, x in cell.items())
        self._tensors = [(cell.place(key), x) for cell, key, x in held if type(x) is Tensor]


def _holds_another(cell: Cell, before: Any) -> bool:
    """Whether the cell's object holds something else than ``before``."""
    known, cell.before = cell.before, before
    try:
        return cell.moved()
    finally:
        cell.before = known


def _changed_places(cell: Cell, before: Any) -> list[str]:
    """Where in the cell's object that is not ``before``; modes, of which all ranks are told, don't count."""
    if not isinstance(cell, MappingCell):
        return [cell.name]
    now = cell.now()
    keys = (key for key in {**before, **now} if now.get(key, cell) is not before.get(key, cell))
    return [cell.place(key) for key in keys if key != "training" or not isinstance(cell.owner, nn.Module)]


def _environment() -> dict[Any, Any]:
    """The environment now; where Python has it undecoded, as that takes a fraction of the time."""
    held = getattr(os.environ, "_data", None)
    return dict(held) if isinstance(held, dict) else dict(os.environ)


@contextmanager
def watched_numbers(copy: nn.Module, units: Collection[str], noted: set[str]) -> Iterator[None]:
    """Inside, numbers that the units of ``copy`` reach note in ``noted``, by place, that something goes by them."""

    def notice(places: frozenset[Place], question: Question) -> None:
        noted.update(map(str, places))

    lent: list[tuple[Cell, Any, float, float]] = []
    for cell in _cells(copy, units).values():
        for key, value in list(cell.items()) if watches_numbers(cell) else ():
            if type(value) is float:
                number = deciding(value, cell.place(key), notice)
                cell.lend(key, number)
                lent.append((cell, key, value, number))
    try:
        yield
    finally:
        for cell, key, value, number in lent:  # a global is no copy's
            cell.keep(key, value, [number])


def watches_numbers(cell: Cell) -> bool:
    """Whether a watched number can take a number's place there."""
    return not isinstance(cell, (BodyCell, SetCell, TupleCell))


def _values(cell: Cell) -> Iterator[tuple[str, Any]]:
    """The plain values in a cell, by place."""
    if isinstance(cell, SetCell):
        yield cell.name, tuple(sorted(repr(x) for x in cell.before if isinstance(x, _PLAIN)))
        return
    yield from ((cell.place(key), x) for key, x in cell.items() if isinstance(x, _PLAIN))


def _cells(module: nn.Module, units: Collection[str]) -> dict[str, Cell]:
    """What users' modules within units reach, but for what torch's modules hold."""
    reach = Reach(packages_of(module))
    reach.add_modules(_users_modules(module, units))
    return {name: cell for name, cell in reach.cells.items() if not _is_torchs(cell)}


def _users_modules(module: nn.Module, units: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    named = (pair for unit in units for pair in module.get_submodule(unit).named_modules(prefix=unit))
    yield from ((path, child) for path, child in named if not type(child).__module__.startswith(_INNER))


def _is_torchs(cell: Cell) -> bool:
    owner = cell.owner
    return isinstance(owner, nn.Module) and (type(owner).__module__.startswith(_INNER) or not _is_modules(cell))


def _is_modules(cell: Cell) -> bool:
    """Whether the attributes of a module are in it."""
    return isinstance(cell.owner, nn.Module) and getattr(cell, "mapping", None) is vars(cell.owner)


def _own_cells(module: nn.Module, units: Collection[str]) -> dict[str, Cell]:
    """What torch's modules within units hold, by whose code none of the user's goes, and all modules' buffers."""
    cells: dict[str, Cell] = {}
    for name, m in (pair for unit in units for pair in module.get_submodule(unit).named_modules(prefix=unit)):
        if isinstance(m, torch.jit.ScriptModule):
            continue
        if type(m).__module__.startswith(_INNER):
            cells[name] = PublicCell(name, m)
        for kind in (BUFFERS, PARAMETERS):
            if vars(m)[kind]:
                cells[f"{name}.{kind}"] = MappingCell(name, m, vars(m)[kind])
    return cells
