"""Gathered weights that the user's code keeps beyond its call, and views of them: what they stood for they stay.

A whole weight that is kept, as in a list, becomes the stored one once the step's backward has ended. Memory in which
views of one lie stays the weight's (`place`): what is written to the weight, as by an optimizer, is put there, and what
user code writes there is written to the weight before anybody uses that. Whether a rank has such memory is local to it;
where weights change, all ranks are asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.place import Place
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.host_values import agreed
from lightning_par.private.tensors import get_data, is_referred, mark_parameter, set_data
from lightning_par.sharded import aliases


class Escaped:
    """Those of one run.

    Attributes:
        weights: all that are gathered for calls.
        in_calls: those whose calls run: what these write is seen at their end.
    """

    def __init__(self, in_calls: Callable[[], list[Stored]]) -> None:
        self.weights: list[Stored] = []
        self.in_calls = in_calls
        self._found: list[Any] = []
        self._found_of: list[Stored] = []
        self._given: dict[int, list[Place]] = {}  # what user code has had in this step, by the weight's id
        self._kept: dict[int, list[Place]] = {}  # what it still has after one
        self._memories: dict[int, Place] = {}  # where they lie, while they are there
        self._anywhere: set[int] = set()  # ids of weights of which any rank has places, as far as they were asked
        self._asks = False  # whether a call has given wholes since; alike on all ranks
        self._is_stepping = False

    def look(self, weights: Sequence[Stored], wholes: list[Any]) -> None:
        """Note those of ``wholes`` that someone has beside this list, and the weights that they stand for."""
        for number in range(len(wholes)):
            if sys.getrefcount(wholes[number]) > _ALONE and not any(x is wholes[number] for x in self._found):
                self._found.append(wholes[number])
                self._found_of.append(weights[number])

    def placed(self, weights: Sequence[Stored], wholes: list[Tensor]) -> list[Tensor]:
        """``wholes``, just gathered for user code, where its views of them lie."""
        if not self.may_be_here:
            return wholes
        there = [self._put(whole, self._places(x)) for x, whole in zip(weights, wholes)]
        return [places[0] if places else whole for places, whole in zip(there, wholes)]

    def fresh(self, weight: Stored, x: Tensor) -> Tensor:
        """What user code is to have of ``weight``, which lies as ``x``: with a version of its own, or that of views."""
        for place in self._kept.get(id(weight), ()):
            if place.has(x):
                return place.whole()
        return get_data(x)

    def give(self, weight: Stored, whole: Tensor) -> Place:
        """User code has the plain ``whole`` from now on."""
        place = Place(weight, whole)
        self._memories[place.memory] = place
        known = self._given.get(id(weight), ())
        self._given[id(weight)] = [*(x for x in known if x.is_there), place]
        self._asks = True
        return place

    def forget(self, weight: Stored) -> None:
        """It lies elsewhere from now on, by ``weight.data = x``: its views are of it no more."""
        self._kept.pop(id(weight), None)
        self._given.pop(id(weight), None)

    @property
    def may_be_here(self) -> bool:
        """Whether this rank has any."""
        return bool(self._kept or self._given)

    @property
    def may_be_anywhere(self) -> bool:
        """Whether, as far as is known, any rank has any; alike on all."""
        return not self._is_stepping and bool(self._asks or self._anywhere)

    def is_viewed(self, weight: Stored) -> bool:
        return any(place.is_there for place in self._kept.get(id(weight), ()))

    def weight_at(self, memory: int, x: Tensor) -> Stored | None:
        """The weight that ``x``, which lies in ``memory``, is a view of; what was written to it is written to that."""
        place = self._memories.get(memory)
        if place is None or not place.has(x):
            return None
        self.settle([place.weight])
        return place.weight

    def settle(self, weights: Iterable[Stored] | None = None) -> None:
        """Before ``weights``, or all, are used or change: what user code wrote to their views is written to them.

        Those whose calls run are left to the calls' ends.
        """
        if not self.may_be_here:
            return
        if weights is None:
            weights = [places[0].weight for places in {**self._given, **self._kept}.values()]
        for x in weights:
            for place in self._places(x):
                whole = place.written()
                if whole is not None and not any(x is other for other in self.in_calls()):
                    place.write_back(whole, quiet=not place.is_seen)
                    self._wrote(x, whole)

    def end_call(self, weight: Stored, whole: Tensor, place: Place) -> bool:
        """A call has had the ``whole`` of a weight at ``place``: what it has written is written to the weight.

        Returns:
            Whether versions showed it.
        """
        if not place.has(whole):  # by ``x.data = value``
            place.move(whole)
            weight.note_write(whole)
            self.forget(weight)
            self._given[id(weight)], self._memories[place.memory] = [place], place
        elif not place.is_taken and not self.is_viewed(weight):
            if not place.is_seen:
                return False
            place.write_back(whole)
            self._wrote(weight, whole)
            return True
        is_seen = False
        for one in self._places(weight):
            there = one.written()
            if there is not None:
                is_seen |= one.is_seen
                one.write_back(there, quiet=not one.is_seen)  # else its graph may have it from before the write
                self._wrote(weight, there)
        return is_seen

    def _wrote(self, weight: Stored, whole: Tensor) -> None:
        """User code has written to ``weight``, on all ranks alike, which is what is in ``whole`` from now on."""
        weight.note_write(whole)
        self._put_everywhere(weight, whole.detach())
        if aliases.is_any():
            aliases.written([weight._local])

    def begin_step(self, weights: Sequence[Stored]) -> None:
        """An optimizer is about to write to ``weights``; until `end_step` none of its writes by itself counts.

        Raises:
            RuntimeError: ranks have come to different weights before; see `GatherOrder`.
        """
        self.settle(weights)
        if self._asks:
            self._ask()
        self._is_stepping = True

    def end_step(self, weights: Sequence[Stored]) -> None:
        """It has written to ``weights``; see `changed`."""
        self._is_stepping = False
        self.changed(weights)

    def changed(self, weights: Sequence[Stored]) -> None:
        """``weights`` were written to: views of them change, too. All ranks that have parts must call it.

        If calls have had weights since they were asked, a message asks all ranks whether they have views.
        """
        if not weights or not self.may_be_anywhere:
            return
        if self._asks:
            self._ask()
        for x in weights:
            if id(x) in self._anywhere:
                places = self._put_everywhere(x, x.as_gathered())
                if aliases.is_any():  # a slice across the tensor axis is a copy
                    with torch.no_grad():
                        aliases.written(places)

    def _ask(self) -> None:
        self._asks = False
        here = [False] * len(self.weights)
        if self.may_be_here:
            here = [any(place.is_there for place in self._places(x)) for x in self.weights]
        peers = self.weights[0]._peers
        mine = [*here, *peers.order.told()]
        flags = agreed(peers.all_reduce_(torch.tensor(mine, dtype=torch.uint8), "views", "max"), mine, peers)
        self._anywhere = {id(x) for x, there in zip(self.weights, flags) if there}
        peers.order.compare(flags[len(here) :], peers)

    def end_backward(self) -> None:
        """No call, and no backward, uses them any more: what is still there someone keeps."""
        self.settle(places[0].weight for places in [*self._given.values()])
        found, self._found = self._found, []
        weights, self._found_of = self._found_of, []
        for number in range(len(found)):
            if _is_kept(found, number):
                _become(found[number], weights[number])
        found.clear()
        self._asks |= bool(self._given)  # what was there for backward has gone
        given, self._given = self._given, {}
        for key, places in given.items():
            for place in places:
                known = self._kept.get(key, [])
                if place.is_there and not any(place.is_same(x) for x in known):
                    place.keep()
                    self._kept[key] = [*known, place]
        if given:
            self._memories = {x.memory: x for places in self._kept.values() for x in places}

    def hand_over(self, weight: Stored, whole: Tensor) -> None:
        """It is stored no more: let the views of ``weight`` be of ``whole`` from now on."""
        for place in self._put_everywhere(weight, whole.detach())[:1]:
            if place.untyped_storage().nbytes() == place.nbytes:  # or files of it would be larger
                set_data(whole, place)

    def _places(self, weight: Stored) -> list[Place]:
        return [*self._kept.get(id(weight), ()), *self._given.get(id(weight), ())]

    def _put_everywhere(self, weight: Stored, whole: Tensor) -> list[Tensor]:
        """Write it where views of it lie, those that are kept first; returns what lies as it does there."""
        there = self._put(whole, self._places(weight))
        if id(weight) in self._kept and not self.is_viewed(weight):
            del self._kept[id(weight)]
        return there

    @staticmethod
    def _put(whole: Tensor, places: Iterable[Place]) -> list[Tensor]:
        return [there for place in places if (there := place.put(whole)) is not None]


def _is_kept(found: list[Any], number: int) -> bool:
    """Whether a tensor in the list is someone's own, beside the views of it."""
    x = found[number]
    alone = _VIEWED if is_referred(x) else _ALONE
    del x
    return sys.getrefcount(found[number]) > alone


def _become(whole: Tensor, weight: Stored) -> None:
    twin = weight.twin()
    mark_parameter(twin)
    try:
        torch.utils.swap_tensors(whole, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"A module's forward keeps the weight {weight._name or ''!r} beyond its step, and a view of it or a weak "
            "reference to it, which data_parallel='fsdp' can't follow. Read it from the module where it is needed, "
            "keep a `clone()`, or write data_parallel='ddp'."
        ) from error


def _references(x: list[Any]) -> int:
    return max(sys.getrefcount(x[number]) for number in range(len(x)))


def _with_view() -> tuple[list[Tensor], Tensor]:
    found = [torch.zeros(2)]
    return found, found[0][:1]


_ALONE = _references([object()])  # as `Escaped` counts, where a list alone has something
_OF_VIEW = _with_view()
_VIEWED = _references(_OF_VIEW[0])  # the same, where a view's memory of its base has it, too; it differs with torch
del _OF_VIEW
