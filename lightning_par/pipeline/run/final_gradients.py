"""Which gradients are final while the backwards of a step still run, so that their average over replicas can begin.

A parameter's gradient is final with the last backward of the stages of this rank that use it: within it, once as many
gradients have come as there were microbatches, else at its end. What is used on other ranks, too, is summed with these
after all backwards, and so is never told of here; nor is what the recorded step knows no use of.

Replicas may cut their batches into other numbers of microbatches. For the averages of two ranks not to be issued in
opposite orders by two replicas, with messages between stages in between, each of which waits for the one before: whole
backwards of stages end from the last stage to the first, whatever the number. Those of weights alone end in an order of
their own, so there nothing is told before the rank has issued its last message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.timetable import Event, Exchange


class FinalGradients:
    """Follows the events of one rank in one step, and tells of each gradient that will not change any more.

    Args:
        stages: those of this rank that use a leaf.
        tell: called with a leaf, once.
        refuse_late: called with a leaf whose gradient has changed.

    Example::

        finals = FinalGradients({weight: {0}}, ahead.final, ahead.refuse_late)
        finals.follow(timetable.orders[rank])
        for event in timetable.orders[rank]:
            finals.begin(event)
            ...  # in which each leaf that gets a gradient is noted
            finals.end(event)
    """

    def __init__(
        self,
        stages: Mapping[Tensor, Iterable[int]],
        tell: Callable[[Tensor], None],
        refuse_late: Callable[[Tensor], None],
    ) -> None:
        self._stages, self._tell, self._refuse_late = stages, tell, refuse_late
        self._leaves: dict[Event, dict[int, Tensor]] = {}  # by the event with which they are final
        self._passes: dict[int, int] = {}
        self._came: Counter[int] = Counter()
        self._now: dict[int, Tensor] = {}
        self._gate: Event | None = None  # before which nothing is told
        self._kept: list[Tensor] = []

    def follow(self, order: Sequence[Event]) -> None:
        """The step begins, with the rank's events in ``order``."""
        backwards = [event for event in order if isinstance(event, Action) and event.op != "F"]
        last = {event.stage: place for place, event in enumerate(backwards)}
        microbatches = Counter(event.stage for event in backwards if event.op != "W")
        for leaf, used in self._stages.items():
            place = max((last[stage] for stage in used if stage in last), default=None)
            if place is not None:
                self._leaves.setdefault(backwards[place], {})[id(leaf)] = leaf
                self._passes[id(leaf)] = sum(microbatches[stage] for stage in used)
        if any(event.op == "W" for event in backwards):
            self._gate = next((event for event in reversed(order) if isinstance(event, Exchange)), None)

    def note(self, leaf: Tensor) -> None:
        """A backward has added to the gradient of ``leaf``."""
        key = id(leaf)
        self._came[key] += 1
        self._refuse_late(leaf)
        # With one microbatch none before it shows that this one's gradient comes at once.
        if key in self._now and self._came[key] == self._passes[key] > 1:
            self._final(self._now.pop(key))

    def begin(self, event: Event) -> None:
        self._now = self._leaves.get(event, {}) if isinstance(event, Action) else {}

    def end(self, event: Event) -> None:
        while self._now:
            self._final(self._now.pop(next(iter(self._now))))
        if event is self._gate:
            self._gate = None
            while self._kept:
                self._tell(self._kept.pop(0))

    def _final(self, leaf: Tensor) -> None:
        if self._gate is None:
            self._tell(leaf)
        else:
            self._kept.append(leaf)


def stages_by_leaf(
    programs: Sequence[Program], rank: int, named: Mapping[str, Tensor], holders: Callable[[str], tuple[int, ...]]
) -> dict[Tensor, set[int]]:
    """The stages of ``rank`` that use each leaf which no other rank holds.

    Args:
        programs: of the microbatches.
        rank: along the pipeline axis.
        named: the leaves, by name.
        holders: of a parameter.
    """
    each = list({id(program): program for program in programs}.values())
    found: dict[Tensor, set[int]] = {}
    for name, leaf in named.items():
        if holders(name) == (rank,):
            uses = [_uses(program, name) for program in each]
            if all(uses) and all(program.at[stage] == rank for program, used in zip(each, uses) for stage in used):
                found[leaf] = set().union(*uses)
    return found


def _uses(program: Program, name: str) -> set[int]:
    """The stages that use a parameter by itself, or a unit that holds it."""
    found: set[int] = set()
    while name:
        found |= program.uses.get(name, set())
        name = name.rpartition(".")[0]
    return found
