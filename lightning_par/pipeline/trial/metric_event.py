"""A call of a metric by the step, as an analysis notes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_par.pipeline.effects.metrics import value_like
from lightning_par.pipeline.program.program import is_located
from lightning_par.pipeline.trial.samples.sample_sums import Share
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.fake_functions import linked

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


def record_metric(run: Analysis, metric: Any, method: str, args: Any, kwargs: Any) -> Any:
    """Note that ``method`` of a ``metric`` is called; returns what stands for its value."""
    located = [x for x in tensors_in((args, kwargs)) if is_located(x)]
    # Of a part of the batch its value is of no use; whether it is the loss, its tag tells.
    sources = [x.local if isinstance(x, ShardedTensor) else x for x in located]
    value = value_like(metric, method, args, kwargs)
    result = map_tensors(lambda x: linked(run.mode.from_tensor(x.detach()), sources * x.requires_grad), value)
    run.note_told(located)
    run.keep(("metric", method), "located", tensors_in((args, kwargs)), result)
    run.effects += [x for x in tensors_in((args, kwargs)) if is_located(x)]
    run.tags.update((id(x), Share.MIXED) for x in tensors_in(result))
    return result
