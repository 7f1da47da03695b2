"""What the code of a unit reaches, and what it finds by name, to be compared later, or put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_par.pipeline.program.named_by_code import NamedByCode, are_alike
from lightning_par.pipeline.run.unit_calls import LocatedCall
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.mappings import MappingCell
from lightning_par.python_state.cells.sequences import SequenceCell, SetCell, TupleCell
from lightning_par.python_state.contents import CacheCell, ValueCell
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.snapshot import plainly
from lightning_par.python_state.still import Still
from lightning_par.python_state.tensor_writes import version_of

if TYPE_CHECKING:
    from lightning_par.pipeline.effects.watched_run import Watch

_KNOWN = ATOMS | {Tensor, nn.Parameter}  # nothing is in them that could be set
_CELLS = (MappingCell, SequenceCell, SetCell, TupleCell, ValueCell, CacheCell)  # what is done to these is seen
_CLOSED: tuple[Any, ...] = (*_KNOWN, type, FunctionType, BuiltinFunctionType, MethodType, nn.Module, LocatedCall)
_cache_info = methodcaller("cache_info")


class HeldByUnits:
    """Looks at what units reach, and keeps the look from step to step: most of the time nothing has moved.

    Args:
        watch: of the state outside of units, which is its own business.

    Example::

        held = HeldByUnits(watch).of("net", module.net)
        module.net.scale = 2.0
        assert not held.is_as_it_was()
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._units: dict[str, UnitObjects] = {}

    def of(self, path: str, module: nn.Module) -> Held:
        """What the unit holds now."""
        known = self._units.get(path)
        if known is None or known.module is not module or not known.is_apart_from(self.watch.watched()):
            known = self._units[path] = UnitObjects(path, module, self.watch)
        return known.now()


class UnitObjects:
    """All that the code of one unit reaches, but for what others watch.

    Args:
        path: the unit's.
        module: the unit.
        watch: of the state outside of units.

    Attributes:
        turn: counts how often it was other than the time before.
    """

    def __init__(self, path: str, module: nn.Module, watch: Watch) -> None:
        self.path, self.module, self._watch = path, module, watch
        self.turn = 0
        self._watched: Mapping[int, Any] = {}
        self._look()

    def _look(self) -> None:
        with plainly():
            reach = self._watch.reach_of_unit(self.path, self.module)
        self._within, self.cells, self._still = [*self.module.modules()], reach.cells, Still()
        self._kinds, self._named = [*map(type, self._within)], NamedByCode(self._within)
        self._tensors = [x for x in reach.met if not isinstance(x, nn.Parameter)]
        self._caches = [x.owner for x in (*self._watch.caches(), *reach.cells.values()) if isinstance(x, CacheCell)]
        self._apart = {id(x) for x in reach.objects.values() if id(x) in reach.apart}
        self._own = {id(cell.owner) for cell in reach.cells.values()}
        self._both = self._own & reach.apart.keys()  # as globals of one file, of which code names some here, some there
        looked_into = self._own | self._apart
        self.closed = all(isinstance(cell, _CELLS) for cell in reach.cells.values()) and all(
            id(x) in looked_into or isinstance(x, _CLOSED) or _is_plain(x) for x in reach.objects.values()
        )

    def is_apart_from(self, watched: Mapping[int, Any]) -> bool:
        """Whether others watch what they watched when this was looked at, and no more of this."""
        if watched is self._watched:
            return True
        if not self._apart <= watched.keys() or self._own & watched.keys() != self._both:
            return False
        self._watched = watched
        return True

    def now(self) -> Held:
        """What there is now, from which `Held` tells later whether it has moved."""
        if self.moved():
            self.turn += 1
            renewed = [cell.renew(_KNOWN) for cell in self._moved]
            if not self._has_kinds() or not all(renewed):
                self._look()
        return Held(self, self.turn, self.named(), self.writes(), self.caches())

    def moved(self) -> bool:
        """Whether anything is other than when `now` was asked last."""
        self._moved: list[Cell] = self._still.moved(self.cells)
        return bool(self._moved) or not self._has_kinds()

    def _has_kinds(self) -> bool:
        return all(map(is_, map(type, self._within), self._kinds))

    def named(self) -> list[Any]:
        return self._named.now()

    def writes(self) -> list[int]:
        return [*map(version_of, self._tensors)] if self._tensors else []

    def caches(self) -> list[Any]:
        return [*map(_cache_info, self._caches)] if self._caches else []

    def may_be_put_back(self) -> bool:
        """Whether what has moved is of kinds that can be, in cells that did not hold what others watch."""
        kinds = MappingCell, SequenceCell, SetCell
        return self._has_kinds() and all(isinstance(x, kinds) and not x.fixed for x in self._moved)

    def put_back(self, caches: list[Any]) -> None:
        """Undo what has moved, and what was remembered since there were these ``caches``, which were empty then."""
        for cell in self._moved:
            cell.restore()
        for owner, before in zip(self._caches, caches, strict=True):
            if _missed(before, owner.cache_info()):
                owner.cache_clear()


@dataclass(frozen=True, eq=False)
class Held:
    """What a unit held when it was called.

    Attributes:
        objects: the unit's.
        turn: the one in which it was.
        named: see `NamedByCode`.
        writes: how often its tensors were written to.
        caches: how often those of `functools.lru_cache` had been filled.
    """

    objects: UnitObjects
    turn: int
    named: list[Any]
    writes: list[int]
    caches: list[Any]

    def is_as_it_was(self) -> bool:
        """Whether it holds the same now."""
        now = self.objects
        return self.turn == now.turn and not now.moved() and are_alike(now.named(), self.named)

    def may_be_put_back(self, first: bool) -> bool:
        """Whether what the unit has kept since can be undone; that is all it has kept, where it ran for the ``first``
        time."""
        now = self.objects
        if self.turn != now.turn or not now.closed or now.writes() != self.writes:
            return False
        remembered = [before for before, after in zip(self.caches, now.caches(), strict=True) if _missed(before, after)]
        if not now.moved() and not remembered:
            return True
        return first and not any(before.currsize for before in remembered) and now.may_be_put_back()

    def put_back(self) -> None:
        """Undo what the unit has kept, if it `may_be_put_back`."""
        self.objects.moved()
        self.objects.put_back(self.caches)


def _missed(before: Any, after: Any) -> bool:
    return bool(before.misses != after.misses)


def _is_plain(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_plain, x))
    return type(x) in ATOMS


def are_same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))
