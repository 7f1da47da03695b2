"""Iterators, which can't be put back: what they gave is kept, so that each run of a step is given the same."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_par.private.modes import no_modes
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state import generators
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.changes import as_it_is
from lightning_par.python_state.nested_tensors import cloned

Look = Callable[[], Callable[[], Mapping[str, Cell]]]  # at what there is now, whenever that is called
Own = Callable[[Any], Any]  # of an item, what a run may change


class Replay:
    """Takes the place of an iterator while a step runs; afterwards, too, where that gave more than was asked for.

    Args:
        source: the iterator.
        name: of it, for what is refused.
        look: finds what its code may change.
        own: gives of an item what a run may change: what it holds that is watched is given as it is.

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

    of: MutableMapping[int, Replay] = WeakValueDictionary()
    """By the ids of their iterators: who looks at one of these finds it."""

    def __init__(
        self, source: Iterator[Any], name: str = "An iterator", look: Look | None = None,
        given: list[_Given] | None = None, own: Own | None = None,
    ) -> None:  # fmt: skip
        self.source, self.name, self.look, self.own = source, name, look, own or partial(copied_by, {})
        self.given: list[_Given] = [] if given is None else given
        self.at = 0  # how many the run has asked for
        self.running = False
        self.trial = False  # whether the run is one of a copy, at another time than the step's
        self.holders: list[tuple[Cell, Any]] = []  # where it stands for the iterator, between steps

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The iterator's, for code that asks whether it has one."""
        return type(self.source)

    def __iter__(self) -> Replay:
        return self

    def __length_hint__(self) -> Any:
        known = hasattr(type(self.source), "__length_hint__")
        return len(self.given) - self.at + operator.length_hint(self.source) if known else NotImplemented

    def __next__(self) -> Any:
        if not self.running and not self.given:
            return next(self.source)
        if self.at == len(self.given):
            self.given.append(_Given(self.source, self.trial, self.look))
        item = self.given[self.at]
        if self.running:
            self.at += 1
        else:
            del self.given[0]
            if not self.given:
                self.leave()
        if item.early and not self.trial:
            item.check(self.name)
        if item.written is not None:
            raise NotImplementedError(
                f"{self.name} writes into {item.written} in place as it makes an item, and a step runs several times. "
                "Assign a new tensor there, or write a class with __next__."
            )
        trained = next((x for x in tree_leaves(item.item) if _is_trained(x)), None)
        if trained is not None:
            raise NotImplementedError(
                f"{self.name} gives a {type(trained).__name__}, of which a step that runs several times is given a "
                "copy: it would not be trained. Keep them in a list, and count through it: `self.layers[self.i]`."
            )
        return item.again(self.own if self.running else _itself)

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
        self.fill(count)
        del self.given[:count]
        self.at = 0

    def fill(self, count: int) -> None:
        """Have ``count`` items that another rank took; what making them has changed, that has told by itself."""
        while len(self.given) < count:
            self.given.append(_Given(self.source, self.trial, self.look))
            self.given[-1].undo()

    def leave(self) -> None:
        """It has nothing left: the iterator takes its place again."""
        for cell, key in self.holders:
            cell.keep(key, self.source, [self, self.source])
        self.holders = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return itertools.chain, ([x.item for x in self.given if x.error is None], self.source)

    def __copy__(self) -> Any:
        if self.running:
            return self.__deepcopy__({})  # of the items, too, which come from a copy of the source in any case
        chain, (given, source) = self.__reduce__()
        return chain(given, copy.copy(source))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.running:
            chain, (given, source) = self.__reduce__()
            return memo.setdefault(id(self), chain(copied_by(memo, given), copy.deepcopy(source, memo)))
        twin = Replay(self.source, self.name, self.look, self.given, partial(copied_by, memo))
        twin.running = twin.trial = True
        twin.at = self.at
        return memo.setdefault(id(self), twin)


class _Given:
    """One item of an iterator, or how it ended; and what the global generators of numbers went through.

    Args:
        source: the iterator.
        early: whether it is asked before the step that will have the item.
        look: finds what the iterator's code may change.
    """

    def __init__(self, source: Iterator[Any], early: bool, look: Look | None) -> None:
        self.item: Any = None
        self.error: Exception | None = None
        self.before: tuple[Any, ...] | None = None
        self.after: tuple[Any, ...] | None = None
        self.early, self.first = early, True
        self.written: str | None = None  # a tensor
        with no_modes():  # what it computes is no part of the step, and nothing in it is a fake
            self.look = None if look is None else look()
            before, cells = generators.global_state(), {} if self.look is None else self.look()
            try:
                self.item = next(source)
            except Exception as error:  # however it ends, it does so in each run
                self.error = error
            if not generators.same_global_state(before):
                self.before, self.after = before, generators.global_state()
            self.cells = cells
            written = [place for cell in cells.values() for place in cell.overwritten()]
            self.written = written[0] if written else None
            changes = {name: cell.change_unlent() for name, cell in cells.items()}
            self.changes = {name: as_it_is(change) for name, change in changes.items() if change is not None}

    def check(self, name: str) -> None:
        """The step has come for which the item was made.

        Raises:
            RuntimeError: it would have been another one.
        """
        self.early = False
        with no_modes():
            same = self.before is None or generators.same_global_state(self.before)
        if not same:
            raise RuntimeError(
                f"{name} draws from the global generators of random numbers, and a trial of the step has asked it for "
                "an item already. Make it in on_fit_start, or give it a generator of its own."
            )

    def undo(self) -> None:
        """Take back what making the item has changed."""
        for name in self.changes:
            self.cells[name].restore()

    def again(self, own: Own) -> Any:
        """The item, of which the run may change what ``own`` gives."""
        with no_modes():
            if self.after is not None and not self.first:
                generators.set_global_state(self.after)
            if self.changes and not self.first and self.look is not None:  # they were taken back with the first run
                cells = self.look()
                for name, change in self.changes.items():
                    cells[name].apply(as_it_is(change))
            self.first = False
            if self.error is None:
                return own(self.item)
        raise self.error


def _is_trained(x: Any) -> bool:
    return isinstance(x, nn.Module) or isinstance(x, Tensor) and x.requires_grad


def _itself(item: Any) -> Any:
    return item


def copied_by(known: Mapping[int, Any], value: Any) -> Any:
    """A copy of ``value``, with what is ``known`` by its id in place of what that is of."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        return cloned(value)
    try:
        with torch.no_grad():
            return copy.deepcopy(value, dict(known))
    except Exception:  # any class may refuse to be copied, in any way
        return value
