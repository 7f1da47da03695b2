"""Regions of a replayed step that its backward runs again, by torch's own checkpointing, as the module has it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_par.planner.recording.checkpointed import Region
from lightning_par.planner.replay.gpu_kernels import kernels

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
    taken = (id(x) for event in run.step.events[first:end] for x in event.inputs)
    own = run.step.names.keys() - run.parts.keys()  # what ranks store parts of is gathered again
    weights = {key: run.values[key] for key in taken if key in own and key in run.values}
    last = {number: list(keys) for number, keys in run.last.items() if first <= number < end}
    runs = 0

    def events() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            run.run_plainly(made, first, end)
            return
        again = copy.copy(run)
        again.is_second = True
        again.values, again.last, again.asked = {**weights, **given}, defaultdict(list, last), []
        again.gathers = None if run.blocks is None else run.blocks.again
        with kernels(run.place.gpu):
            again.run_plainly(set(), first, end)

    # No generator draws for fakes, and a region that backward runs comes to what it came to.
    with set_checkpoint_early_stop(region.stops):
        checkpoint(
            events, use_reentrant=False, context_fn=region.context_fn,
            preserve_rng_state=False, determinism_check="none",
        )  # fmt: skip


def _begins(run: ReplayRun, first: int, end: int) -> list[Tensor]:
    """What the events take that they don't make, but for weights."""
    found: dict[int, Tensor] = {}
    made: set[int] = set()
    for event in run.step.events[first:end]:
        found.update((id(x), x) for x in event.inputs if id(x) not in made and id(x) in run.values)
        made.update(map(id, event.outputs))
    return [x for x in found.values() if id(x) not in run.step.names]
