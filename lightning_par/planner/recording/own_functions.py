"""Which of the user's autograd functions a plan runs again as a run does: as one, forward and backward.

Those are handed whole tensors along tensor and sequence, and meet whole gradients. What takes weights that it is not
given, as a reversible network's does, or goes by values in its backward, is run by the functions that it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.planner.recording.unit_runs import told
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.trial.applied_functions import Applied

if TYPE_CHECKING:
    from lightning_par.planner.recording.recorded import RecordedStep


def whole_calls(step: RecordedStep) -> tuple[Applied, ...]:
    """The calls that can be run so."""
    runs: dict[Any, bool] = {}  # those that are alike once
    found = []
    for call in step.recording.applied:
        if call.end == call.first or _takes_more(step, call):
            continue
        key = call.function, told(call.args)
        if key not in runs:
            runs[key] = _runs(call)
        if runs[key]:
            found.append(call)
    return tuple(found)


def _takes_more(step: RecordedStep, call: Applied) -> bool:
    """Whether it takes what is of the model beside its arguments."""
    known = {id(x) for x in tree_leaves(call.args)}
    for event in step.events[call.first : call.end]:
        if any(id(x) in step.names or id(x) in step.of_model for x in event.inputs if id(x) not in known):
            return True
        known.update(id(x) for x in event.outputs)
    return False


def _runs(call: Applied) -> bool:
    """Whether it runs forward and backward on tensors without values."""

    def given(x: Any) -> Any:
        return torch.empty_like(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    try:
        with torch.enable_grad():
            made = call.function.apply(*tree_map(given, call.args))
            ends = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.backward(ends, [torch.empty_like(x) for x in ends])
    except Exception:  # whatever the user's code raises of them
        return False
    return True
