"""An iterator that a step reaches: items that a run takes of it are given again, or gone where the run counts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.changes import ValueChange
from lightning_par.python_state.iterators import Look, Own, Replay


class IteratorCell(Cell):
    """An iterator; its `Replay` stands where it is held."""

    def __init__(
        self, name: str, owner: Any, fixed: str | None = None, look: Look | None = None, own: Own | None = None
    ) -> None:
        super().__init__(name, owner, fixed)
        replay = owner if type(owner) is Replay else Replay(owner, name, look)
        self.replay = replay if replay is owner else Replay.of.setdefault(id(owner), replay)
        self.own = own or self.replay.own
        self.holders: list[tuple[Cell, Any]] = []
        self.renew(())

    def renew(self, atoms: Collection[Any]) -> bool:
        # A trial of a unit is within one of the step: how many that has asked for, and whether there is one.
        self.start, self.within = self.replay.at, self.replay.running
        self.taken: int | None = None  # once that is settled
        return True

    @property
    def before(self) -> int:  # type: ignore[override]
        """How many items had been taken."""
        return self.start

    @before.setter
    def before(self, taken: int) -> None:
        self.start = taken

    def lend_itself(self) -> None:
        if not self.within:  # else the run around it has lent what it watches
            self.replay.own = self.own
        self.replay.at, self.replay.running = self.start, True
        for cell, key in self.holders:
            cell.lend(key, self.replay)

    def moved(self) -> bool:
        return self.change() is not None

    def change(self) -> ValueChange | None:
        taken = self.replay.at - self.start if self.taken is None else self.taken
        return ValueChange(taken) if taken else None

    def restore(self) -> None:
        """To be called after its holders': where the iterator gave something already, the replay stays."""
        self.replay.at, self.replay.running = self.start, self.within
        if self.replay.given and not self.within:
            self._hold(self.replay)

    def settle(self) -> None:
        """The run counts: what it has taken is gone, as far as the run around it counts."""
        self.taken = self.replay.at - self.start
        if not self.within:
            self.replay.running = False
            self.replay.commit(self.taken)
            self._hold(self.replay if self.replay.given else self.replay.source)

    def apply(self, change: ValueChange) -> None:
        if self.within:
            self.replay.at = self.start + change.value
            self.replay.fill(self.replay.at)
            return
        self.replay.commit(change.value)
        self._hold(self.replay if self.replay.given else self.replay.source)

    def _hold(self, value: Any) -> None:
        self.owner = value
        if value is self.replay:
            self.replay.holders = self.holders
            for cell, key in self.holders:
                cell.keep(key, value, [self.replay, self.replay.source])
        else:
            self.replay.holders = self.holders
            self.replay.leave()
