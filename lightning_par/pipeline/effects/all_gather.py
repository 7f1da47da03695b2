"""``self.all_gather`` within a step, as contrastive losses call it: what the replicas have of one value, as an event.
So is ``self.trainer.strategy.reduce``.

It runs on the ranks that have the value, along the data axis alone, whose ranks come to it in one order: they run the
same program. A trial is of one replica: there the others have what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_par.mesh.replicas import as_tensors, of_all_replicas
from lightning_par.pipeline.run.located import Run
from lightning_par.private.modes import innermost_mode
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.run_state import RunState


def gathering(module: nn.Module) -> Callable[..., Any]:
    """In place of the ``all_gather`` of the LightningModule ``module``, in a step and its trials."""

    def gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        device: Any = module.device
        return all_gather(as_tensors(data, device), group, sync_grads)

    return gather


def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """In place of a strategy's ``all_gather``, in a step and its trials."""
    copies = RunState.current.copies_of_model
    if copies is None or copies.size == 1:
        return data
    return map_tensors(lambda x: gathered(x, copies.size, sync_grads), data)


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
        return torch.stack([x if sync_grads else x.detach()] * copies)
    replicas = RunState.current.copies_of_model
    assert replicas is not None
    return of_all_replicas(x, replicas, sync_grads)
