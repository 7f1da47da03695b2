"""Code of ``torch.jit.script``, which torch runs apart: it meets no views of a batch's samples, and no function that
draws is met in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_par.pipeline.program.event_draws import DRAWING
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.private.torchscript import failed_in_torchscript, operators_in
from lightning_par.sharded.rules.lookup import user_line

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


@contextmanager
def scripts_unseen(what: str) -> Iterator[None]:
    """Raises `SamplesMixError` where scripted code inside met the view of a batch.

    Args:
        what: how the message begins, up to the word "code".
    """
    try:
        yield
    except RuntimeError as error:
        if not failed_in_torchscript(error):
            raise
        raise SamplesMixError(f"{what} of torch.jit.script, in which samples can't be followed") from error


def close_scripted_draws(run: Analysis, func: Any) -> None:
    """A module whose code calls ``func`` on values of the model can't be taken apart where that is scripted and draws.

    Raises:
        NotImplementedError: the step itself calls it.
    """
    if not isinstance(func, torch.jit.ScriptFunction) or DRAWING.isdisjoint(operators_in(func)):
        return
    if not run.homes and run.is_within():
        run.close_modules("it calls code of torch.jit.script that draws random numbers")
        return
    raise NotImplementedError(
        f"{user_line()}: {func.name!r}, code of torch.jit.script, draws random numbers that the other stages of the "
        "pipeline can't follow. Draw them outside of it, leave out torch.jit.script, or use TensorParallelStrategy."
    )
