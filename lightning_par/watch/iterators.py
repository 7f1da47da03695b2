"""Iterators, which can't be put back: what they gave is kept, so that each run of a step is given the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_par import generators, private
from lightning_par.watch.cells import Cell
from lightning_par.watch.changes import ValueChange


class Replay:
    """Takes the place of an iterator while a step runs; afterwards, too, where that gave more than was asked for.

    Args:
        source: the iterator.

    Example::

        replay = Replay(itertools.count())
        replay.running = True
        assert [next(replay), next(replay)] == [0, 1]
        replay.at = 0
        assert next(replay) == 0
        replay.commit(1)
        replay.running = False
        assert [next(replay), next(replay)] == [1, 2]
    """

    of: dict[int, Replay] = {}
    """Those that have something left, by the ids of their iterators."""

    def __init__(self, source: Iterator[Any], name: str = "An iterator", given: list[_Given] | None = None) -> None:
        self.source, self.name = source, name
        self.given: list[_Given] = [] if given is None else given
        self.at = 0  # how many the run has asked for
        self.running = False
        self.trial = False  # whether the run is one of a copy, at another time than the step's
        self.holders: list[tuple[Cell, Any]] = []  # where it stands for the iterator, between steps

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if not self.running and not self.given:
            return next(self.source)
        if self.at == len(self.given):
            self.given.append(_Given(self.source, self.trial))
        item = self.given[self.at]
        if self.running:
            self.at += 1
        else:
            del self.given[0]
            if not self.given:
                self.leave()
        if item.early and not self.trial:
            item.check(self.name)
        return item.again()

    def send(self, value: Any) -> Any:
        """A generator's `send`; only what `next` asks for can be kept."""
        if self.running or value is None:
            if value is not None:
                raise RuntimeError(
                    "The step sends a value into a generator, and runs several times. Write a class with a method."
                )
            return next(self)
        return self.source.send(value)  # type: ignore[attr-defined]

    def commit(self, count: int) -> None:
        """The step has taken ``count`` items."""
        while len(self.given) < count:
            self.given.append(_Given(self.source, self.trial))
        del self.given[:count]
        self.at = 0

    def leave(self) -> None:
        """It has nothing left: the iterator takes its place again."""
        Replay.of.pop(id(self.source), None)
        for cell, key in self.holders:
            cell.keep(key, self.source, [self, self.source])
        self.holders = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replay:
        twin = Replay(self.source, self.name, self.given)
        twin.running = twin.trial = True
        return memo.setdefault(id(self), twin)


class _Given:
    """One item of an iterator, or how it ended; and what the global generators of numbers went through.

    Args:
        source: the iterator.
        early: whether it is asked before the step that will have the item.
    """

    def __init__(self, source: Iterator[Any], early: bool) -> None:
        self.item: Any = None
        self.error: Exception | None = None
        self.before: tuple[Any, ...] | None = None
        self.after: tuple[Any, ...] | None = None
        self.early, self.first = early, True
        with private.no_modes():  # what it computes is no part of the step, and nothing in it is a fake
            before = generators.global_state()
            try:
                self.item = next(source)
            except Exception as error:  # however it ends, it does so in each run
                self.error = error
            if not generators.same_global_state(before):
                self.before, self.after = before, generators.global_state()

    def check(self, name: str) -> None:
        """The step has come for which the item was made.

        Raises:
            RuntimeError: it would have been another one.
        """
        self.early = False
        with private.no_modes():
            same = self.before is None or generators.same_global_state(self.before)
        if not same:
            raise RuntimeError(
                f"{name} draws from the global generators of random numbers, and a trial of the step has asked it for "
                "an item already. Make it in on_fit_start, or give it a generator of its own."
            )

    def again(self) -> Any:
        """The item, of which the run may change what can be changed."""
        with private.no_modes():
            if self.after is not None and not self.first:
                generators.set_global_state(self.after)
            self.first = False
            if self.error is None:
                return _own(self.item)
        raise self.error


def _own(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        with torch.no_grad():
            return copy.deepcopy(value)
    except Exception:  # any class may refuse to be copied, in any way
        return value


class IteratorCell(Cell):
    """An iterator; its `Replay` stands where it is held."""

    def __init__(self, name: str, owner: Any, fixed: str | None = None) -> None:
        super().__init__(name, owner, fixed)
        self.replay = owner if isinstance(owner, Replay) else Replay.of.get(id(owner)) or Replay(owner, name)
        self.holders: list[tuple[Cell, Any]] = []

    def lend_itself(self) -> None:
        self.replay.at, self.replay.running = 0, True
        for cell, key in self.holders:
            cell.lend(key, self.replay)

    def change(self) -> ValueChange | None:
        return ValueChange(self.replay.at) if self.replay.at else None

    def restore(self) -> None:
        """To be called after its holders': where the iterator gave something already, the replay stays."""
        self.replay.at, self.replay.running = 0, False
        if self.replay.given:
            self._hold(self.replay)

    def apply(self, change: ValueChange) -> None:
        self.replay.commit(change.value)
        self._hold(self.replay if self.replay.given else self.replay.source)

    def _hold(self, value: Any) -> None:
        self.owner = value
        if value is self.replay:
            Replay.of[id(self.replay.source)] = self.replay
            self.replay.holders = self.holders
            for cell, key in self.holders:
                cell.keep(key, value, [self.replay, self.replay.source])
        else:
            self.replay.holders = self.holders
            self.replay.leave()
