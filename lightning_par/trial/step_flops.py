"""FLOPs of a training step as one device does it, forward and backward: of its recording, without computing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_par.private.graph import made_by
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.functions import CONVOLUTIONS, MATRIX_PRODUCTS, RECURRENT, TRANSPOSED_CONVOLUTIONS
from lightning_par.trial.fake_functions import OnOnes
from lightning_par.trial.recording import Event, Recording
from lightning_par.trial.step import loss_in

_COSTLY = MATRIX_PRODUCTS | CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | RECURRENT | {"scaled_dot_product_attention"}


def step_flops(recording: Recording) -> int | None:
    """What torch's ``FlopCounterMode`` counts of a step and its backward; None where that is not known.

    Each function is run once more on tensors without memory, and its gradients are asked for where the step's loss
    needs them: a frozen weight has none, and what a checkpoint computes a second time counts once. Attention counts as
    its two products, masked or not.

    Args:
        recording: of a step that ran with gradients.

    Example::

        model = nn.Linear(8, 16)
        model.training_step = lambda batch: model(batch).sum()
        flops = step_flops(record_step(model, "training_step", torch.ones(4, 8)))
        assert flops == 2 * 2 * 4 * 8 * 16  # the batch needs no gradient
    """
    if recording.stopped is not None:
        return None
    reached = nodes_behind(loss_in(recording.result))
    known: dict[str, int] = {}
    total = 0
    for event in recording.events:
        if not event.inputs or not event.outputs:
            continue
        backward = any(x.requires_grad and (reached is None or made_by(x) in reached) for x in event.outputs)
        key = f"{event.name} {backward} {tree_map(_outline, (event.args, event.kwargs))}"
        if key not in known:
            try:
                known[key] = _flops(event, backward)
            except Exception:  # whatever a function raises on tensors without memory
                if event.name in _COSTLY:
                    return None
                known[key] = 0
        total += known[key]
    return total


def _flops(event: Event, backward: bool) -> int:
    func = event.func.in_place_of if isinstance(event.func, OnOnes) else event.func
    made: dict[int, Tensor] = {}

    def unreal(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            empty = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")
            made[id(x)] = empty.requires_grad_(backward and x.requires_grad)
        leaf = made[id(x)]
        return leaf.clone() if leaf.requires_grad else leaf  # no leaf may be written into

    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        args, kwargs = tree_map(unreal, (event.args, event.kwargs))
        outputs = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        leaves = [x for x in made.values() if x.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.empty_like(x) for x in outputs], allow_unused=True)
    return int(counter.get_total_flops())


def _outline(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x


def nodes_behind(loss: Tensor | None) -> set[Any] | None:
    """The nodes of the graph that a backward from ``loss`` runs; None where the step does not say from where."""
    if loss is None or loss.grad_fn is None:
        return None
    found, rest = {loss.grad_fn}, [loss.grad_fn]
    while rest:
        for node, _ in rest.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                rest.append(node)
    return found
