"""What code in the backward of a stage logs, prints by the module and gives to loggers: one rank alone runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from torch import nn

from lightning_par.pipeline.effects.logged_outputs import Recorder, layers_heard
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState


@contextlib.contextmanager
def hooks_heard(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """A backward runs inside, of this rank alone: what its hooks log, print by ``module`` and ask of loggers goes to
    the ``recorder``."""
    state = RunState.current
    before, state.hooks_alone = state.hooks_alone, True
    try:
        with layers_heard(module, recorder):
            yield
    finally:
        state.hooks_alone = before


def refuse_unforeseen(what: str) -> NoReturn:
    """Nobody waits for ``what`` code in a backward calls."""
    raise NotImplementedError(
        f"{user_line()}: code that runs in backward calls {what}. The ranks of a pipeline, each of which runs the "
        "backward of its own layers, hear of that where a hook on a module, an activation or a parameter does it "
        "and the batch is left whole (microbatches=1, without allow_batch_coupling). Do it there, in "
        "on_after_backward, or in the step."
    )
