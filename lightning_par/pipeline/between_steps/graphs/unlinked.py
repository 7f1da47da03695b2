"""Values that are known on all ranks of a pipeline, but whose gradients can't be: what they are made of is spread."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_par.sharded.no_backward import without_backward


def no_gradients(what: str) -> str:
    """That ``what`` has none of which all ranks know."""
    return (
        f"What {what} has no gradients here: it is used in a step, or the run has ended, or it goes by tensors with a "
        "graph that a layer has from an earlier call, or in an object of another kind than lists, dicts and "
        "dataclasses, or is for the `.grad` of a copy of weights, as one by `copy.deepcopy`. Call `backward` in the "
        "same hook, give such tensors to the layer as arguments, and ask for gradients of copies by "
        "`torch.autograd.grad`."
    )


def unlinked(x: Tensor, what: str, of: Iterable[Tensor]) -> Tensor:
    """``x``, requiring a gradient that can't be had: a backward that comes to it raises.

    Args:
        x: what may have a gradient on one device.
        what: the message says of it, after "What".
        of: what it is made of: who asks for the gradient of one of these alone comes to it, too, and is not told that
            there is none.
    """
    return without_backward(x, no_gradients(what), of)
