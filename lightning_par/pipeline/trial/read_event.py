"""A value of the model that the step turns into a number, as an analysis notes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_par.pipeline.program.program import StepEvent
from lightning_par.pipeline.trial.call_context import modes_around
from lightning_par.pipeline.trial.placeholders import read_placeholder, says_yes_or_no
from lightning_par.pipeline.trial.samples.sample_sums import tag_of
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


def record_read(run: Analysis, func: Any, name: str, args: Any, kwargs: Any, located: list[Tensor]) -> Any:
    """Note that ``func``, whose name is ``name``, asks for a value of ``located``; returns a guess of it."""
    place = run.read_at = user_line()
    run.close_modules(f"it reads a value at {place}", reads=True)
    if any(tag_of(run.tags, x) for x in located) or any(isinstance(x, ShardedTensor) for x in located):
        run.reads.append((len(run.events), place))
    elif not all(map(run.values.is_parameter, located)):
        run.reads.append((len(run.events), place))
    run.has_read = True
    run.note_told(located)
    if not run.training and not run.is_within():
        run.read_first = run.read_first or place
    result = read_placeholder(name, located[0], args)
    if says_yes_or_no(name, located[0]):
        run.asks[len(run.events)] = run.guesses.latest
        if run.settled.get(id(located[0])) is result:
            run.sure.add(len(run.events))
    run.events.append(StepEvent(func, "read", run.values.keys_of(located), result, place, modes_around()))
    run.values.kept.append((args, kwargs))
    return result
