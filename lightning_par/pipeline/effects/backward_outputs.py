"""What code in the backward of a stage logs, prints by the module and gives to loggers: one rank alone runs it."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from torch import nn

from lightning_par.pipeline.effects.logged_outputs import LayersHeard, Recorder
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState


class HooksHeard(contextlib.AbstractContextManager[None]):
    """A backward runs inside, of this rank alone: what its hooks log, print by ``module`` and ask of loggers goes to
    the ``recorder``. May be entered many times."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self._layers = LayersHeard(module, recorder)

    def __enter__(self) -> None:
        state = RunState.current
        self._state, self._before = state, state.hooks_alone
        self._layers.__enter__()
        state.hooks_alone = True

    def __exit__(self, *exception: object) -> None:
        self._layers.__exit__(*exception)
        self._state.hooks_alone = self._before


def refuse_unforeseen(what: str) -> NoReturn:
    """Nobody waits for ``what`` code in a backward calls."""
    raise NotImplementedError(
        f"{user_line()}: code that runs in backward calls {what}. The ranks of a pipeline, each of which runs the "
        "backward of its own layers, hear of that where a hook on a module, an activation or a parameter does it "
        "and the batch is left whole (microbatches=1, without allow_batch_coupling). Do it there, in "
        "on_after_backward, or in the step."
    )
