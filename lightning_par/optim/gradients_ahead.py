"""Gradients that are averaged before the backward is called that only delivers them, as that of a pipeline's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_par.optim.gradient_buckets import Buckets


class Ahead:
    """The average of one step's gradients, whose messages leave as gradients become final.

    All ranks make as many messages, of as many bytes, as where gradients are averaged at delivery, in the same order.

    Args:
        buckets: of all leaves whose gradients are averaged.
        delivers: called once the averages are there: the next backward gives them.
        name: of a leaf, for messages.

    Example::

        ahead.final(weight)  # while other gradients are still computed
        ahead.send_rest(grads)
        grads = ahead.land(grads)
    """

    def __init__(self, buckets: Buckets, delivers: Callable[[], None], name: Callable[[Tensor], str]) -> None:
        self._buckets, self._delivers, self._name = buckets, delivers, name
        self._land: Callable[[], list[tuple[Tensor, Tensor]]] | None = None

    def final(self, leaf: Tensor) -> None:
        """No more is added to ``leaf.grad``, which may be None."""
        if leaf in self._buckets:
            if leaf.grad is not None and leaf.grad.is_sparse:
                raise TypeError(f"{self._name(leaf)!r} has a sparse gradient; make its layer with sparse=False.")
            self._buckets.arrive(leaf, lambda x: x.grad)

    def refuse_late(self, leaf: Tensor) -> None:
        """To be called where something was added to the gradient of ``leaf``.

        Raises:
            RuntimeError: it is on its way already.
        """
        if leaf in self._buckets and self._buckets.has_left(leaf):
            raise RuntimeError(
                f"The gradient of {self._name(leaf)!r} changed after it was sent to the other replicas: the layer runs "
                "a backward of its own within backward, as reentrant checkpointing does, in some microbatches alone. "
                "Write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def send_rest(self, grads: Mapping[Tensor, Tensor | None]) -> None:
        """Send what has not left yet, once all ``grads`` are there. All ranks must call it."""
        self._land = self._buckets.send_rest(grads.get, lambda x: grads.get(x) is not None)

    @torch.no_grad()
    def land(self, grads: Mapping[Tensor, Tensor | None]) -> dict[Tensor, Tensor | None]:
        """Wait; returns ``grads`` averaged, in their own memory, and of leaves of which only other ranks had some."""
        assert self._land is not None
        found = dict(grads)
        for leaf, average in self._land():
            own = found.get(leaf)
            if own is None:
                found[leaf] = average.clone()  # a view would keep the bucket in memory
            else:
                own.copy_(average)
        self._delivers()
        return found
