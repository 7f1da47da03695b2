"""Python loops over values whose number depends on the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_par.pipeline.plan.no_schedule import NoScheduleError

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis

_PARTS = frozenset("__iter__ unbind split chunk tensor_split".split())
"""Functions whose results are as many as Python code goes over."""


def refuse_loops(run: Analysis) -> None:
    """Until the last module is called, all runs of a step must do the same, on the last stage, too.

    Raises:
        NoScheduleError: the step goes over values whose number depends on the model's, as those of `torch.unique`.
    """
    unsized: set[int] = set()
    for index, event in enumerate(run.events[: run.tail]):
        follows = any(source in unsized for source, _ in event.inputs)
        if follows or event.unsized and not event.claimed:
            unsized.add(index)
        if follows and getattr(event.func, "__name__", "") in _PARTS:
            raise NoScheduleError(
                f"{event.place}: the step goes over values here, how many of which there are depends on values of the "
                "model, and a module follows. Move this into the forward of a module that stays in one place, or use "
                "TensorParallelStrategy."
            )
