"""Gradients that hooks keep as they run within backward: other ranks are told what is in them, and have no gradient
there that a clip, or an average over replicas, could still change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lightning_par.pipeline.between_steps.gradients.own_gradient import held_here
from lightning_par.pipeline.effects.told_changes import Changed
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import tensors_in


def refused(changed: Iterable[Changed], module: nn.Module) -> Iterator[str]:
    """Why the gradients of ``module`` themselves that are stored in what has ``changed`` can't be told."""
    stored = [
        (place, memory_of(x))
        for each in changed
        for place, change in (*each.shared.items(), *each.own.items())
        for x in tensors_in(vars(change))
        if type(x) is Tensor
    ]
    if not stored:
        return
    held = ((name, held_here(p)) for name, p in module.named_parameters())
    names = {memory_of(grad): name for name, grad in held if type(grad) is Tensor}
    for place, memory in [pair for pair in stored if pair[1] in names][:1]:
        yield (
            f"A hook on a gradient stores the gradient of {names[memory]!r} itself, `p.grad`, in {place}. The other "
            "stages of the pipeline have a copy, which a clip does not reach. Store `p.grad.clone()`, or use "
            "TensorParallelStrategy."
        )
