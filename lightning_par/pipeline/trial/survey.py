"""What a first run of a step tells before it is known how it is cut into stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from lightning_par.pipeline.plan.units import ModuleCall
from lightning_par.pipeline.trial.call_costs import Frame

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Seen:
    """A function, or the call of a unit, as two runs of a step on batches of other sizes have it.

    Attributes:
        what: the function, or the name of the unit.
        place: file:line of the user's code.
        shapes: of what came of the batch alone.
    """

    what: Any
    place: str
    shapes: Shapes = ()

    def is_as(self, other: Seen) -> bool:
        return (self.what, self.place) == (other.what, other.place)


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        path: of the module.
        depth: in how many other calls it lies.
        first: the number of functions before it.
        end: the number of functions before and within it.
        place: file:line of the user's code that calls it.
    """

    path: str
    depth: int
    first: int
    end: int
    place: str


@dataclass(frozen=True)
class Survey:
    """What a step does, all functions of all modules.

    Attributes:
        root: the calls of modules, with what they cost on the batch.
        samples: of the batch that the step ran on: one more than the batch has, or as many.
        functions: all, in order.
        calls: of modules, in the order in which they began.
        ends: whether it is all of the step: what goes by values of the model is known once there are some.
    """

    root: ModuleCall
    samples: int = 0
    functions: tuple[Seen, ...] = ()
    calls: tuple[Call, ...] = ()
    ends: bool = True

    def outside(self, units: Collection[str]) -> Iterator[Seen]:
        """What the step does where these modules are called as a whole.

        Example::

            names = [seen.what for seen in survey.outside(["layers.0"])]
        """
        end, inside = 0, None
        for call in self.calls:
            if inside is not None and call.depth > inside:
                continue
            inside = None
            if call.path in units:
                yield from self.functions[end : call.first]
                yield Seen(call.path, call.place)
                end, inside = call.end, call.depth
        yield from self.functions[end:]


def calls_in(frame: Frame, depth: int = 0) -> Iterator[Call]:
    """The calls within that of ``frame``, in the order in which they began."""
    for child in frame.children:
        yield Call(child.path, depth, child.first, child.end, child.place)
        yield from calls_in(child, depth + 1)


def same(ours: list[Seen], theirs: list[Seen]) -> Iterator[tuple[int, int]]:
    """What both runs do, by number: all, or what lies before and behind a loop over samples."""

    def alike(pair: tuple[Seen, Seen]) -> bool:
        return pair[0].is_as(pair[1])

    before = sum(1 for _ in takewhile(alike, zip(ours, theirs)))
    yield from zip(range(before), range(before))
    most = min(len(ours), len(theirs)) - before  # what was met from the front is not met again
    behind = sum(1 for _ in takewhile(alike, zip(ours[::-1][:most], theirs[::-1])))
    yield from zip(range(len(ours) - behind, len(ours)), range(len(theirs) - behind, len(theirs)))


def scaled(call: ModuleCall, factor: float) -> ModuleCall:
    """``call`` with ``factor`` times the costs."""
    children = tuple(scaled(child, factor) for child in call.children)
    return replace(call, flops=call.flops * factor, nbytes=call.nbytes * factor, children=children)
