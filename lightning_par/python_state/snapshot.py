"""The state that a step reaches, kept while a run changes it, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_par.private.dict_versions import version_of_dict
from lightning_par.private.modes import no_modes
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.iterators import IteratorCell
from lightning_par.python_state.cells.sequences import TupleCell
from lightning_par.python_state.changes import Change, MappingChange, as_it_is
from lightning_par.python_state.contents import CacheCell, LockedCell
from lightning_par.python_state.exchanged_tensors import exchange
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.spare_tensors import Spares, grouped, may_be_copied
from lightning_par.python_state.still import Still
from lightning_par.python_state.tensor_writes import forget_write, is_written, overwrite, version_of

_SMALL = 1 << 16  # entries of a tensor of which a look at it has a copy
_Kind = TypeVar("_Kind", bound=Cell)


class Snapshot(Reach):
    """What the modules, and all that they reach, hold now.

    Args:
        modules: by name.
        packages: as for `Reach`.
        apart: as for `Reach`.
        code: as for `Reach`.
        hooks: as for `Reach`.

    Example::

        module.seen = []
        snapshot = Snapshot([("self", module)])
        module.seen.append(1)
        assert snapshot.changes()["self.seen"].rest == [1]
        snapshot.restore()
        assert module.seen == []
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        packages: frozenset[str] = frozenset(),
        apart: Mapping[int, str] | None = None,
        code: bool = True,
        hooks: bool = True,
    ) -> None:
        super().__init__(packages, apart, code, hooks)
        self._copies: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._still = Still()
        self.turn = 0  # counts how often tensors came or went
        self._moves: dict[Cell, tuple[int, set[tuple[str, Any, int]]]] = {}  # of dicts, at a version
        with plainly():
            self.add_modules(modules)
        self._note_versions()

    def add(self, name: str, value: Any) -> None:
        with plainly():
            super().add(name, value)
        self._note_versions()

    def add_units(self, modules: Sequence[tuple[str, nn.Module]]) -> list[str]:
        """Look into modules whose tensors are on one rank alone.

        Returns:
            The names of the cells that nothing else reaches.
        """
        known = set(self.cells)
        with plainly():
            self.add_modules(modules)
        left = {id(self.cells.pop(name, None)) for name in [f"{name}._buffers" for name, _ in modules]}
        for held in self.tensors.values():
            held.slots = [slot for slot in held.slots if id(slot[0]) not in left]
        self.tensors = {key: held for key, held in self.tensors.items() if held.slots}
        self._note_versions()
        return [name for name, cell in self.cells.items() if name not in known and not cell.fixed]

    def copy_tensors(self) -> Snapshot:
        """Let `restore` put back tensors, too, that are changed in place without being lent, as far as they are small.

        Returns:
            Itself.
        """
        tensors = (held.tensor for held in self.tensors.values() if held.lends and not held.tensor.is_meta)
        with plainly():
            self._copies = [(x, version_of(x), x.detach().clone()) for x in tensors]
        return self

    def compare_contents(self) -> Snapshot:
        """Let `left` tell, too, what is written into small tensors by ways that their versions don't count.

        Returns:
            Itself.
        """
        with plainly():
            for held in self.tensors.values():
                x = held.tensor
                copy = None if x.is_meta or x.numel() > _SMALL else x.detach().clone()
                for cell, key in held.slots if copy is not None else ():
                    cell.watch(key, x, copy)
        return self

    def keep_tensors(self, spares: Spares) -> None:
        """As `copy_tensors`, until `let_tensors_go`; copies that ``spares`` still have are not made again."""
        self._note_versions()
        with plainly():
            groups = grouped(x.tensor for x in self.tensors.values() if x.lends and not x.tensor.is_meta)
            found = spares.of((group for group in groups if may_be_copied(group)), self.uncounted)
        held = (x.tensor for x in self.tensors.values() if id(x.tensor) in found)
        self._copies = [(x, version_of(x), found[id(x)]) for x in held]

    def let_tensors_go(self) -> None:
        """What is done to tensors from now on stays."""
        self._copies = []

    def renew(self) -> bool:
        """Take what is there now for what was there before; False where other objects have come or gone."""
        cells: Iterable[Cell] = self.cells.values()
        if self._still.is_so(self.cells):  # but that iterators count from where they are
            cells = self._of(IteratorCell)
        return all(map(self._renew, cells))

    def settle(self, changed: Iterable[str]) -> bool:
        """As `renew`, of the objects of these names alone."""
        return all(self._renew(self.cells[name]) for name in changed if name in self.cells)

    def _renew(self, cell: Cell) -> bool:
        if cell.renew(ATOMS):
            return True
        with plainly():
            known = exchange(self, cell)
        if known:  # all is as another walk would leave it
            self._copies = []
            self.turn += 1
            self._note_versions()
        return known

    def lend(self, spares: Spares, as_is: Collection[int] = (), modules: bool = True) -> None:
        """Let a run have copies of tensors, and the items of iterators, until `restore`.

        Args:
            spares: where copies come from.
            as_is: ids of tensors that the run may change.
            modules: whether it may change the tensors of modules; else it has a copy of these.
        """
        self._note_versions(as_is)
        with plainly():
            # so that their copies share memory, too
            groups = grouped(x.tensor for key, x in self.tensors.items() if x.lends and key not in as_is)
            found = spares.of((group for group in groups if may_be_copied(group)), self.uncounted)
        for held in self.tensors.values():
            spare = found.get(id(held.tensor))
            for cell, key in held.slots if spare is not None else ():
                if modules or id(cell) not in self.of_modules:
                    cell.versions.pop(key, None)
                    cell.lend(key, spare)
        for cell in self._of(LockedCell):
            cell.lock()
        self.lend_iterators()

    def lend_iterators(self) -> Snapshot:
        """Let a run have the items of iterators, until `restore` or `settle_iterators`.

        Returns:
            Itself.
        """
        for cell in self._of(IteratorCell):
            cell.lend_itself()
        waiting = [cell for cell in self._of(TupleCell) if cell.lent]
        while waiting:
            one = waiting.pop()
            one.lend_itself()
            waiting += [holder for holder, _ in one.holders if isinstance(holder, TupleCell)]
        return self

    def settle_iterators(self) -> None:
        """The run has ended, and counts: the items of iterators that it has taken are gone."""
        for cell in self._of(IteratorCell):
            cell.settle()
        self._refuse_written_items()

    def changes(self) -> dict[str, Change]:
        """What a run has changed since, by the name of the object."""
        touched = {id(cell) for cell in self._still.touched(self.cells)}
        found = ((name, cell.change()) for name, cell in self.cells.items() if id(cell) in touched)
        return {name: change for name, change in found if change is not None}

    def left(self) -> dict[str, Change]:
        """What code that was lent nothing has changed since, by the name of the object, and later does not change."""
        found = ((name, cell.change_unlent()) for name, cell in self.cells.items() if not cell.fixed)
        return {name: as_it_is(change) for name, change in found if change is not None}

    def moves(self) -> set[tuple[str, Any, int]]:
        """What is other than before, as a run goes on: empty where nothing is, equal where nothing more has changed."""
        moved = self._still.moved(self.cells)
        return set().union(*map(self._moves_of, moved)) if moved else set()

    def _moves_of(self, cell: Cell) -> set[tuple[str, Any, int]]:
        held = None if cell.lent or cell.versions else cell.counted()
        version = None if held is None else version_of_dict(held)
        known = self._moves.get(cell)
        if known is not None and known[0] == version:  # a step is asked around each of its modules
            return known[1]
        change = cell.change() if cell.lent or cell.moved() else None
        if isinstance(change, MappingChange) and not (change.inplace or change.deleted or change.order):
            found = {(cell.name, key, id(x)) for key, x in change.entries.items()}
            if version is not None:
                self._moves[cell] = version, found
            return found
        return {(cell.name, object(), 0)} if change is not None or cell.overwritten() else set()  # equal to nothing

    def original(self, stand_in: torch.Tensor) -> torch.Tensor | None:
        """The tensor for which ``stand_in`` stands in now."""
        for held in self.tensors.values():
            for cell, key in held.slots:
                if key in cell.lent and cell.lent[key][0] is stand_in:
                    return held.tensor
        return None

    def stand_ins(self) -> dict[int, str]:
        """The names of the objects for which something stands in now, by the id of that."""
        found = {id(cell.replay): cell.name for cell in self._of(IteratorCell)}
        for cell in self.cells.values():
            for key, (stand_in, _) in cell.lent.items():
                name = self.names.get(id(cell.before[key]))
                if name is not None:
                    found[id(stand_in)] = name
        return found

    def restore(self) -> list[str]:
        """Put everything back.

        Returns:
            The names of tensors that could not be put back, having no copy.
        """
        overwritten: list[str] = []
        iterators: list[Cell] = []
        for cell in self._still.touched(self.cells):
            overwritten += cell.overwritten()
            if isinstance(cell, IteratorCell):
                iterators.append(cell)
            else:
                cell.restore()
        for cell in iterators:  # behind what holds them, which has put them back
            cell.restore()
        with plainly(), torch.no_grad():
            for x, version, copy in self._copies:
                if is_written(x, version, copy):
                    overwrite(x, copy)
        self._refuse_written_items()
        return overwritten

    def forget_cached(self) -> None:
        """What caches of functions have remembered since, where they were empty, goes."""
        for cell in self._of(CacheCell):
            cell.forget()

    def _refuse_written_items(self) -> None:
        given, self.items_given = self.items_given, []
        for name, copy, version in given:
            if is_written(copy, version):
                raise NotImplementedError(
                    f"The step changes {name} in place, which an iterator gave it, and runs several times: what it had "
                    "was a copy. Keep such tensors in a list, and count through it: `self.tensors[self.i]`."
                )

    def locked(self) -> list[tuple[str, Any]]:
        """The arrays that a run may only read, with their names."""
        return [found for cell in self._of(LockedCell) for found in cell.arrays()]

    def _of(self, kind: type[_Kind]) -> list[_Kind]:
        """The cells of one kind: most have none, and are asked in every step."""
        cells: list[Any] = [*self.cells.values()]
        return [*compress(cells, map(isinstance, cells, repeat(kind)))]

    def _note_versions(self, as_is: Collection[int] = ()) -> None:
        for held in self.tensors.values():
            for cell, key in held.slots:
                cell.versions.pop(key, None)
                if id(held.tensor) not in as_is:
                    cell.watch(key, held.tensor)
            forget_write(held.tensor)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """No mode sees what is done inside, and copies count their changes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield
