"""A step that goes by values which its module holds beside weights, as buffers: it is recorded with these."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.trial.large_values import is_large


def record_with_held(
    module: nn.Module, with_values: Callable[[], nn.Module], record: Callable[[nn.Module], RecordedStep]
) -> tuple[nn.Module, RecordedStep]:
    """What ``record`` makes of ``module``, whose buffers have no values; where the step fails or goes on by a guess of
    these, of the module ``with_values``, if that can be built. Returns which module it was, too.

    Raises:
        ValueError: fakes can't run the step.
    """
    step: RecordedStep | ValueError
    try:
        step = record(module)
        if not goes_by_held(step):
            return module, step
    except ValueError as error:
        step = error
    try:
        known = with_values()
    except ValueError:  # what it holds is made of values of weights
        known = module
    if known is not module:
        return known, record(known)
    if isinstance(step, ValueError):
        raise step
    return module, step


def goes_by_held(step: RecordedStep) -> bool:
    """Whether ``step`` reads what comes of neither weights nor the batch alone, and is not too large to have values.

    Example::

        assert goes_by_held(record(module, batch))  # `if self.mask.any():`, of a buffer on ``meta``
    """
    known = {id(x) for x in step.recording.batch} | step.names.keys() | step.of_model
    for event in step.events:
        held = [x for x in event.inputs if id(x) not in known and not is_large(x)]
        if held and event.reads:
            return True
        if not held:
            known.update(id(x) for x in event.outputs)
    return False
