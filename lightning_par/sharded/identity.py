"""A tensor that becomes another one and stays the same object: what refers to it stays right."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_par.private.compiler import forget_traced
from lightning_par.private.modules import derived_weights, forget_weak_references, renew_weak_references
from lightning_par.private.tensors import PARAMETER_MARK
from lightning_par.sharded.lost_graphs import refuse_gradient
from lightning_par.sharded.parameter_hooks import hang
from lightning_par.sharded.user_classes import REMEMBERED, put_on, users_class

_OWN = {
    "_local",
    "_dim",
    "_positions",
    "_axis",
    PARAMETER_MARK,
    "_facts",
    "_peers",
    "_inner",
    "split_over",
    "_strides",
    "_form",
    "_shown_grad",
    "_name",
    "_patches",
    "_memory_asked_for",
    REMEMBERED,
}  # what makes a tensor of ours what it is


def become(old: Tensor, new: Tensor, name: str) -> None:
    """Turn the object ``old`` into ``new``, and the other way round; what the user hung on ``old`` stays there,
    hooks among it, as does the class that they gave it.

    Args:
        old: a parameter or buffer; loses its gradient.
        new: a leaf that nothing else refers to.
        name: of the parameter, for the message.

    Raises:
        RuntimeError: something else still holds the tensor.

    Example::

        become(module.weight, nn.Parameter(torch.zeros(2, 2)), "weight")
    """
    attributes = {key: value for key, value in vars(old).items() if key not in _OWN}
    kind = users_class(old)
    old.grad = None
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        gc.collect()  # a graph of an earlier step may still hold the parameter
        forget_traced()
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError as error:
            raise RuntimeError(
                f"The parameter {name} can't be split or made whole, since something else still holds it: an autograd "
                "graph of an earlier step, or a weak reference. Detach or delete what was computed from it."
            ) from error
    put_on(old, kind)
    for key, value in attributes.items():
        setattr(old, key, value)
    hang(old)


@contextmanager
def swappable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the weights of ``modules`` can `become` others.

    An RNN's weak references to its own forbid it, the graph of a weight that hooks computed of them, as norms and masks
    of pruning do, and that of what a forward of before has left in an attribute: the next one computes it anew.
    """
    modules = [*modules]
    rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
    derived = [(module, weight) for module in modules for weight in derived_weights(module)]
    for rnn in rnns:
        forget_weak_references(rnn)
    for module, weight in derived:
        setattr(module, weight.name, getattr(module, weight.name).detach())
    for module, name, x in [(m, name, x) for m in modules for name, x in vars(m).items() if type(x) is Tensor]:
        if x.grad_fn is not None:
            why = (
                f"{name!r} of a {type(module).__name__} was computed by weights that have been split over ranks since: "
            )
            setattr(module, name, refuse_gradient(x.detach(), f"{why}compute it in the step that takes its gradient."))
    try:
        yield
    finally:
        for rnn in rnns:
            renew_weak_references(rnn)
        for module, weight in derived:  # each call computes it anew
            if all(type(getattr(module, name)) in (nn.Parameter, Tensor) for name in weight.of):
                with torch.no_grad():
                    setattr(module, weight.name, weight.compute())
