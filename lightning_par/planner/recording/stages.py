"""Which functions of a recorded step each stage of a pipeline runs, which parameters it holds, and what crosses.

The stages are those that the strategy plans by itself, from the same calls of modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_par.pipeline.plan.stage_plan import StagePlan, make_stage_plan
from lightning_par.pipeline.plan.stage_ranges import Homes
from lightning_par.pipeline.plan.uncalled import homes_of_uncalled
from lightning_par.planner.recording.checkpointed import filled
from lightning_par.planner.recording.notes import BatchValue, Heard
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.planner.recording.told_values import told_values
from lightning_par.planner.recording.updates import WeightCall, updates_of


@dataclass(frozen=True, eq=False)
class StageCut:
    """A recorded step, cut into stages.

    Attributes:
        starts: the event with which each stage begins.
        held: the names of the parameters of each stage, in the order of the module.
        crossing: the values that each stage takes from the one before it.
        batch_values: what the step itself makes of the batch alone, which all ranks do once for all microbatches.
        called: the modules that the pipeline calls as a whole, or would call.
        updates: what the step does with weights alone, of no stage.
        plan: by which it was cut; None of one stage.
        unit_calls: of each event the call of a unit that it is in, by the call's number; 0: it is in none. Empty of one
            stage.
        told: ids of the values that count as the step ends, which go on to the last stage.
        grows: of crossing values that the batch does not determine, by their ids, how many times as many elements they
            have on the whole batch, of which all microbatches see the size.
    """

    starts: tuple[int, ...]
    held: tuple[tuple[str, ...], ...]
    crossing: tuple[tuple[Tensor, ...], ...]
    batch_values: tuple[BatchValue, ...] = ()
    called: tuple[str, ...] = ()
    updates: tuple[WeightCall, ...] = ()
    plan: StagePlan | None = None
    unit_calls: tuple[int, ...] = ()
    told: frozenset[int] = frozenset()
    grows: Mapping[int, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.starts)

    def spans(self, events: int) -> tuple[tuple[int, int], ...]:
        """The first event of each stage, and the one behind its last, of so many."""
        return tuple(zip(self.starts, (*self.starts[1:], events)))

    def units(self, firsts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The runs of each stage by their numbers, of which ``firsts`` has the first event of each."""
        bounds = [*self.starts, float("inf")]
        return tuple(
            tuple(number for number, first in enumerate(firsts) if begin <= first < end)
            for begin, end in zip(bounds, bounds[1:])
        )


def cut_stages(
    module: nn.Module,
    step: RecordedStep,
    count: int,
    asked: Sequence[str] | Mapping[str, int] | None = None,
    like: StageCut | None = None,
) -> StageCut:
    """Cut ``step`` into ``count`` stages as the strategy does: the slowest as fast as can be, or as ``asked``.

    Args:
        module: whose step it is.
        step: as recorded.
        count: of stages.
        asked: where they begin, or the stage of each unit; None: that is planned.
        like: the same step on more samples, whose stages are taken.

    Raises:
        ValueError: there are fewer modules than stages, ``asked`` names what is none, or the step can't be cut.
    """
    names = [found[0] for found in step.recording.parameters]
    if count == 1:
        return StageCut((0,), (tuple(names),), ((),))
    if step.root is None:
        raise ValueError("the step takes gradients of its own, and can't be cut into stages")
    known = None if like is None else like.plan
    plan = known or make_stage_plan(step.root, count, asked or None, module="the module")
    units = _unit_calls(step, plan)
    starts = _starts(step, plan, count, units)
    heard: Heard = step.recording.heard
    values = tuple(x for x in heard.batch_values if units[x.call] is None)
    homes = {**plan.homes, **homes_of_uncalled(module, plan.homes)}

    def outside(number: int) -> bool:
        return (note := step.notes[number]) is None or units[note.call] is None

    updates = updates_of(step, outside)
    apart = {call.event for call in updates}
    told = told_values(step, lambda path: any(f"{path}.".startswith(f"{unit}.") for unit in plan.homes), outside)
    calls = filled([None if note is None else units[note.call] or 0 for note in step.notes], 0)
    returned = _returned(step, calls)
    crossing = tuple((*_across(step, start, apart, told), *_across_units(returned, start)) for start in starts)
    held, grows = _held(step, homes, starts, apart), {} if like is None else _grows(step, crossing, like.crossing)
    return StageCut(starts, held, crossing, values, (*homes,), updates, plan, calls, told, grows)


def _unit_calls(step: RecordedStep, plan: StagePlan) -> dict[int, int | None]:
    """Of a call of a module, the call of a unit around it or itself."""
    found: dict[int, int | None] = {0: None}
    for number, call in enumerate(step.calls[1:], 1):
        around = found[call.outer]
        found[number] = around if around is not None else number if call.path in plan.homes else None
    return found


def _starts(
    step: RecordedStep, plan: StagePlan, count: int, outermost: Mapping[int, int | None]
) -> tuple[int, ...]:  # fmt: skip
    """The first event of each stage: that of its first unit."""
    places = {call: i for i, call in enumerate(sorted({x for x in outermost.values() if x is not None}))}
    starts = [0] + [len(step.events)] * (count - 1)
    for number, note in enumerate(step.notes):
        unit = None if note is None else outermost[note.call]
        if unit is not None:
            stage = plan.calls[places[unit]][1]
            for before in range(1, stage + 1):
                starts[before] = min(starts[before], number)
    return tuple(starts)


def _held(
    step: RecordedStep, units: Homes, starts: Sequence[int], apart: Collection[int]
) -> tuple[tuple[str, ...], ...]:
    """The parameters of each stage: of its units, and those that its functions take; the last one has what none has.
    Events that are ``apart`` are of no stage."""
    homes: dict[str, set[int]] = defaultdict(set)
    stage = 0
    for number, event in enumerate(step.events):
        while stage + 1 < len(starts) and starts[stage + 1] <= number:
            stage += 1
        for x in event.inputs if number not in apart else ():
            if id(x) in step.names:
                homes[step.names[id(x)][0]].add(stage)
    order = [names[0] for names in step.recording.parameters]
    for names in step.recording.parameters:
        for name in names:
            unit = next((unit for unit in units if name.startswith(f"{unit}.")), None)
            homes[names[0]] |= set() if unit is None else set(units[unit])
        homes[names[0]] = homes[names[0]] or {len(starts) - 1}
    return tuple(tuple(name for name in order if stage in homes[name]) for stage in range(len(starts)))


def _across(
    step: RecordedStep, start: int, apart: Collection[int], told: Collection[int]
) -> tuple[Tensor, ...]:  # fmt: skip
    """The values of the model that are there when the event ``start`` begins, and taken from there on or ``told`` as
    the step ends, but for what is made ``apart``."""
    there = ((x, made) for x, made, taken in step.lives if start and (taken >= start or id(x) in told))
    return tuple(x for x, made in there if made < start and made not in apart)


def _returned(step: RecordedStep, calls: Sequence[int]) -> list[tuple[Tensor, int, int]]:
    """What units make of no weight, as masks, and others take; each with the events that make it and take it last.

    Args:
        step: as recorded.
        calls: of each event the call of a unit that it is in; 0: it is in none, and all ranks run it.
    """
    made: dict[int, tuple[Tensor, int]] = {}
    taken: dict[int, int] = {}
    for number, event in enumerate(step.events):
        taken.update((id(x), number) for x in event.inputs if id(x) in made and calls[made[id(x)][1]] != calls[number])
        new = (x for x in event.outputs if calls[number] and id(x) not in step.of_model and id(x) not in step.names)
        for x in new:
            made.setdefault(id(x), (x, number))
    return [(*made[key], last) for key, last in taken.items()]


def _across_units(returned: Sequence[tuple[Tensor, int, int]], start: int) -> tuple[Tensor, ...]:
    """Those of `_returned` that are there when the event ``start`` begins, and taken from there on."""
    return tuple(x for x, made, taken in returned if made < start <= taken)


def _grows(
    step: RecordedStep, crossing: Sequence[Sequence[Tensor]], whole: Sequence[Sequence[Tensor]]
) -> dict[int, float]:
    """See `StageCut.grows`; ``whole`` is what crosses on the whole batch."""
    if [*map(len, crossing)] != [*map(len, whole)]:
        return {}
    pairs = (pair for ours, theirs in zip(crossing, whole) for pair in zip(ours, theirs))
    return {id(x): y.numel() / x.numel() for x, y in pairs if id(x) not in step.of_batch and x.numel()}
