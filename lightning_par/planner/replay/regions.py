"""Regions of a replayed step that its backward runs again, by torch's own checkpointing, as the module has it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_par.planner.recording.checkpointed import Region
from lightning_par.planner.replay.gpu_kernels import kernels
from lightning_par.private.pytree import tree_leaves

if TYPE_CHECKING:
    from lightning_par.planner.replay.replay_run import ReplayRun


def run_again(run: ReplayRun, region: Region, made: set[int], first: int, end: int) -> None:
    """Run the events from ``first`` to ``end`` of ``run``, of which the graph keeps what they begin with.

    Args:
        run: whose values they take and make.
        region: that they are.
        made: they add the ids of what they make.
        first: the first event.
        end: the one behind the last.
    """
    given = {id(x): run.values[id(x)] for x in _begins(run, first, end)}
    if region.reentrant and run.blocks is None:  # nothing gathers stored weights for a second run with its own graph
        _run_reentrant(run, given, made, (first, end))
        return
    second = _Second(run, first, end)
    runs = 0

    def events() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            run.run_plainly(made, first, end)
            return
        second.run(given)

    # No generator draws for fakes, and a region that backward runs comes to what it came to.
    with set_checkpoint_early_stop(region.stops):
        checkpoint(
            events, use_reentrant=False, context_fn=region.context_fn,
            preserve_rng_state=False, determinism_check="none",
        )  # fmt: skip


def _run_reentrant(run: ReplayRun, given: dict[int, Any], made: set[int], span: tuple[int, int]) -> None:
    """As `run_again`, of a region whose second run has a graph of its own, from what it begins with to what it makes,
    both of which are there until that one's backward has ended."""
    second, keys = _Second(run, *span), tuple(given)
    outs = _ends(run, *span)
    runs = 0

    def events(*taken: Tensor) -> tuple[Tensor, ...]:
        nonlocal runs
        runs += 1
        if runs > 1:
            values = second.run(dict(zip(keys, taken)))
            return tuple(values[key] for key in outs)
        run.values.update(zip(keys, taken))
        run.run_plainly(made, *span)
        return tuple(run.values.pop(key) for key in outs)

    taken = tuple(given.values())
    given.clear()
    found = checkpoint(events, *taken, use_reentrant=True, preserve_rng_state=False)
    run.values.update(zip(outs, found))


class _Second:
    """What runs the events from ``first`` to ``end`` of ``run`` again.

    Args:
        run: that runs them first.
        first: the first event.
        end: the one behind the last.
    """

    def __init__(self, run: ReplayRun, first: int, end: int) -> None:
        self._run, self._first, self._end = run, first, end
        taken = (id(x) for event in run.step.events[first:end] for x in event.inputs)
        own = run.step.names.keys() - run.parts.keys()  # what ranks store parts of is gathered again
        self._weights = {key: run.values[key] for key in taken if key in own and key in run.values}
        self._last = {number: list(keys) for number, keys in run.last.items() if first <= number < end}

    def run(self, given: dict[int, Any]) -> dict[int, Any]:
        """The values that are there in the end, beginning with those ``given``."""
        again = copy.copy(self._run)
        again.is_second = True
        again.values, again.last, again.asked = {**self._weights, **given}, defaultdict(list, self._last), []
        again.gathers = None if self._run.blocks is None else self._run.blocks.again
        with kernels(self._run.place.gpu):
            again.run_plainly(set(), self._first, self._end)
        return again.values


def _ends(run: ReplayRun, first: int, end: int) -> list[int]:
    """Ids of the values of the model that the events make, and that are taken after them or are the step's result."""
    step = run.step
    result = {id(x) for x in tree_leaves(step.recording.result) if isinstance(x, Tensor)}
    result |= {id(one.value) for one in step.recording.ends}
    return [id(x) for x, made, last in step.lives if first <= made < end and (last >= end or id(x) in result)]


def _begins(run: ReplayRun, first: int, end: int) -> list[Tensor]:
    """What the events take that they don't make, but for weights."""
    found: dict[int, Tensor] = {}
    made: set[int] = set()
    for event in run.step.events[first:end]:
        found.update((id(x), x) for x in event.inputs if id(x) not in made and id(x) in run.values)
        made.update(map(id, event.outputs))
    return [x for x in found.values() if id(x) not in run.step.names]
