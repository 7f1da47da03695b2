"""Which values cross from which stage to which, and how they get there."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from lightning_par.pipeline.program.program import Key

Arrival = tuple[Key, int]
"""A value, and the stage that it comes from."""
Use = tuple[Key, float]
"""A value, and the event that takes it; infinity for what counts at the step's end."""


@dataclass(frozen=True)
class Routes:
    """The way of every value that is made in one stage and taken in another.

    Attributes:
        coming: for each stage, what comes to it, in order.
        tail: what the code behind the last unit takes.
        written: for each stage, which of the values that come to it it writes into.

    Example::

        routes = Routes(coming=((), (((0, 0), 0),)), tail=(), written=(frozenset(), frozenset()))
        assert routes.leaving[0] == {(0, 0): (1,)}
    """

    coming: tuple[tuple[Arrival, ...], ...]
    tail: tuple[Key, ...]
    written: tuple[frozenset[Key], ...]

    @cached_property
    def keys_coming(self) -> tuple[frozenset[Key], ...]:
        """For each stage, what comes to it."""
        return tuple(frozenset(key for key, _ in arrivals) for arrivals in self.coming)

    @cached_property
    def leaving(self) -> tuple[dict[Key, tuple[int, ...]], ...]:
        """For each stage, what leaves it, in order, and the stages that take it."""
        found: list[dict[Key, tuple[int, ...]]] = [{} for _ in self.coming]
        for stage, arrivals in enumerate(self.coming):
            for key, source in arrivals:
                found[source][key] = (*found[source].get(key, ()), stage)
        return tuple({key: stages[key] for key in sorted(stages)} for stages in found)

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """Every value that crosses or that the tail takes."""
        return tuple(sorted({*self.tail, *(key for arrivals in self.coming for key, _ in arrivals)}))


def relayed(uses: Iterable[Use], starts: Sequence[int], tail: int) -> Routes:
    """From stage to stage: each takes all that lives across its beginning from the one before it."""
    last = _last_uses(uses)
    coming: list[tuple[Arrival, ...]] = [()]
    for stage, start in enumerate(starts[1:], 1):
        coming.append(tuple((key, stage - 1) for key in _across(last, start)))
    return Routes(tuple(coming), _across(last, tail), (frozenset(),) * len(starts))


def direct(uses: Iterable[Use], starts: Sequence[int], tail: int, rewritten: Mapping[Key, Sequence[int]]) -> Routes:
    """Straight from the stage that made a value, or was the last to write into it, to each that takes it.

    Args:
        uses: every value with each event that takes it.
        starts: the event with which each stage begins.
        tail: the first event behind the last unit.
        rewritten: the events that write into the memory of a value after it was made, ascending.
    """
    uses = list(uses)
    coming: list[dict[Key, int]] = [{} for _ in starts]

    def take(key: Key, event: float) -> None:
        # what counts at the end is for the last stage
        stage = len(starts) - 1 if event == inf else stage_of(starts, event)
        writes = [w for w in rewritten.get(key, ()) if w < event]
        source = stage_of(starts, writes[-1] if writes else key[0])
        if source != stage:
            coming[stage][key] = source
        if writes:
            take(key, writes[-1])  # what writes needs the value as it was before

    for key, event in sorted(uses):
        take(key, event)
    written: list[set[Key]] = [set() for _ in starts]
    for key, writes in rewritten.items():
        for stage in {stage_of(starts, write) for write in writes}:
            written[stage] |= {key} & coming[stage].keys()
    arrivals = tuple(tuple(sorted(found.items())) for found in coming)
    return Routes(arrivals, _across(_last_uses(uses), tail), tuple(map(frozenset, written)))


def stage_of(starts: Sequence[int], event: float) -> int:
    """The stage in which an event lies: the last one that begins at or before it."""
    return bisect_right(starts, event) - 1


def _last_uses(uses: Iterable[Use]) -> dict[Key, float]:
    last: dict[Key, float] = defaultdict(float)
    for key, event in uses:
        last[key] = max(last[key], event)
    return last


def _across(last: Mapping[Key, float], cut: int) -> tuple[Key, ...]:
    return tuple(sorted(key for key, use in last.items() if key[0] < cut <= use)) if cut else ()
