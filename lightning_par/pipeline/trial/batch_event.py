"""A torch function of the batch alone, as an analysis runs it, with values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_par.pipeline.program.batch_values import has_graph, touches_state, written_by
from lightning_par.pipeline.program.constants import constants_of
from lightning_par.pipeline.program.event_functions import is_setting
from lightning_par.pipeline.program.program import StepEvent, is_located
from lightning_par.pipeline.trial.numbers_written import Memory
from lightning_par.private.fake_tensors import FakeTensor, unset_fake_temporarily
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import READS
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.trial.fake_functions import run_on_ones
from lightning_par.trial.large_values import is_large, note_made

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


def record_on_batch(run: Analysis, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run ``func``, whose name is ``name``, and note it as an event unless it is a setting; returns its result."""
    run.lent.about_to_run(name, args, kwargs)
    large = [x for x in tensors_in((args, kwargs)) if is_large(x)]
    if large and name in READS:
        result = run.read_large(func, large[0], args)
    else:
        result = _computed(run, func, name, args, kwargs, large)
    run.values.memory.forget()
    index = len(run.events)
    tensors = tensors_in(result)
    if is_setting((args, kwargs), result):
        return result
    run.values.memory_of_batch[index] = Memory.of(name, args, kwargs, result, run.values.is_state)
    if touches_state(func, args, kwargs, result, run.values.is_state):
        run.values.views.update(id(x) for x in tensors)
        run.changes_state |= bool(written_by(name, args, kwargs))
    run.events.append(StepEvent(func, "batch", (), None, user_line(), graphed=any(map(has_graph, tensors))))
    run.note_constants(index, (args, kwargs, result))
    run.shapes[index] = [tuple(x.shape) for x in tensors]
    run.values.made_of_batch(index, (args, kwargs), result)
    run.note_alias(func, args, result)
    return result


def _computed(run: Analysis, func: Any, name: str, args: Any, kwargs: Any, large: list[Tensor]) -> Any:
    """What ``func`` makes of the batch alone, and of ``large`` values."""
    into = written_by(name, args, kwargs)
    if not all(map(is_large, into)):  # what has values is written into
        run.note_large(large)
    try:
        with unset_fake_temporarily(), run.without_large():
            result = func(*args, **kwargs)
    except RuntimeError:
        if not large:
            raise
        run.note_large(large)
        result = run_on_ones(run.mode, func, args, kwargs)
    if large or any(isinstance(x, FakeTensor) for x in tensors_in(result)):
        with unset_fake_temporarily():
            told = hash((str(func), constants_of((args, kwargs), is_located)))
        note_made((result, into), (args, kwargs), told)
    return result
