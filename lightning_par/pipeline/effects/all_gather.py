"""``self.all_gather`` within a step, as contrastive losses call it: what the replicas have of one value, as an event.
So is ``self.trainer.strategy.reduce``.

It runs on the ranks that have the value, along the data axis alone, whose ranks come to it in one order: they run the
same program. A trial is of one replica: there the others have what it has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_par.mesh.replicas import of_all_replicas, of_like_replicas
from lightning_par.pipeline.run.located import Run
from lightning_par.private.modes import innermost_mode
from lightning_par.sharded.run_state import RunState


def all_gather(x: Tensor, sync_grads: bool) -> Tensor:
    """In place of a strategy's ``all_gather``, in a step and its trials: see `gathered`."""
    copies = RunState.current.copies_of_model
    return x if copies is None or copies.size == 1 else gathered(x, copies.size, sync_grads)


def of_copies(x: Tensor) -> Tensor:
    """What all copies of the model have of ``x``, for the user's own collectives; see `RunState.of_copies`."""
    return all_gather(x, sync_grads=False)


def reduced(x: Tensor, op: str) -> Tensor:
    """In place of a strategy's ``reduce``, in a step and its trials: ``x``, where the result is written.

    Args:
        x: of any shape.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
    """
    copies = RunState.current.copies_of_model
    if copies is None or copies.size == 1:
        return x
    of_all = gathered(x, copies.size, False)
    whole = of_all.amax(0) if op == "max" else of_all.amin(0) if op == "min" else of_all.sum(0)
    with torch.no_grad():
        return x.copy_(whole / copies.size if op == "mean" else whole)


def gathered(x: Tensor, copies: int, sync_grads: bool) -> Tensor:
    """``x`` of each of so many ``copies`` of the model, along a new first dim.

    Args:
        x: alike in shape on all of them.
        copies: how many there are.
        sync_grads: whether gradients go back to where each was gathered from, as sums over the copies.
    """
    if innermost_mode() is not None or has_torch_function_unary(x):
        return handle_torch_function(gathered, (x,), x, copies, sync_grads)  # type: ignore[no-any-return]
    if Run.current is not None and Run.current.is_trial:
        return of_like_replicas(x, copies, sync_grads)
    replicas = RunState.current.copies_of_model
    assert replicas is not None
    return of_all_replicas(x, replicas, sync_grads)
