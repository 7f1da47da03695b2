"""Islands of a recorded step that are not those of one in which a layer stands for its like: then no layer does."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import Tensor

from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.tensor.plan import Dealt, deal

_RANKS = 2


def with_islands_apart(step: RecordedStep) -> tuple[RecordedStep, dict[int, Dealt]]:
    """``step``, in which no layer stands for its like where these are not split alike: where islands go on behind it,
    as in an MLP of layers with one product each, or where something else becomes of it, as of branches that meet. And
    how islands are dealt out, by the number of ranks, as far as that was found out."""
    dealt = deal(step.folded, _RANKS)
    if step.hands_on(dealt.search.values.keys()) or not (_is_chain(step) or _splits_alike(step, dealt)):
        return step.unfolded(), {}
    return step, {_RANKS: dealt}


def _is_chain(step: RecordedStep) -> bool:
    """Whether of runs that are alike each goes by the one before, and the rest of the step by one alone."""
    counts = Counter(run.kind for run in step.runs)
    made: dict[int, int] = {}
    last: dict[int, int] = {}  # of a kind, the run so far
    taken: dict[int, set[int]] = defaultdict(set)  # of a kind, the runs whose values others take
    for number, run in enumerate(step.runs):
        for event in step.events[run.first : run.end]:
            for source in (made[id(x)] for x in event.inputs if id(x) in made and made[id(x)] != number):
                kind = step.runs[source].kind
                if kind != run.kind:
                    taken[kind].add(source)
                elif source != last[kind]:
                    return False
            if counts[run.kind] > 1:
                made.update((id(x), number) for x in event.outputs if id(x) in step.of_model)
        last[run.kind] = number
    return all(len(runs) < 2 for runs in taken.values())


def _splits_alike(step: RecordedStep, dealt: Dealt) -> bool:
    """Whether the islands ``dealt`` out of the folded step are those of the whole one."""
    whole = deal(step.recording, _RANKS)
    parameters = step.recording.parameters.values()
    return all(_part(whole, x) == _part(dealt, step.stands.get(id(x), x)) for x in parameters)


def _part(dealt: Dealt, x: Tensor) -> tuple[int, ...] | None:
    """Along which dim ``x`` is split, and how much of it each rank has."""
    positions = dealt.positions.get(id(x))
    return None if positions is None else (dealt.search.found[id(x)].dim, *map(positions.count, range(_RANKS)))
