"""Where a graph that all ranks of a pipeline have ends in weights that some of them hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.private.graph import at_end_of_backward, current_backward
from lightning_par.private.leaf_hooks import hooks_of, set_hooks
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.sharded.tensor import leaf


class WeightEnds:
    """Leaves of autograd's graph: the weights that are here, and on other ranks what stands for them. A graph that had
    the latter themselves would hold them beyond the run.

    Args:
        owner: a `lightning_par.pipeline.between_steps.remote_reads.JointGradients`.

    Attributes:
        closed: whether the run has ended.

    Example::

        ends = WeightEnds(gradients)
        y = function.apply(x, ends.of(module.weight))
        ends.run_hooks(module.weight)  # in backward, before it gets a gradient
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._stands: dict[int, tuple[Any, Tensor]] = {}
        self._backward = -1
        self.closed = False

    def of(self, weight: Any) -> Tensor:
        """The end that stands for ``weight``."""
        if not isinstance(weight, Elsewhere):
            return leaf(weight)
        _, stand = self._stands.get(id(weight), (None, None))
        if stand is None or stand.dtype != weight.dtype or stand.device != weight.device:
            stand = torch.empty((), dtype=weight.dtype, device=weight.device).expand(_shape(weight))
            self._stands[id(weight)] = weight, stand.requires_grad_()
        return self._stands[id(weight)][1]

    def close(self) -> None:
        """The run ends, after which a weight is what it was, and a graph that was made before knows nothing of that."""
        self.closed = True
        self._stands.clear()

    def edge(self, weight: Any) -> GradientEdge:
        """Where its gradient arrives."""
        with DisableTorchFunctionSubclass():
            return get_gradient_edge(self.of(weight))

    def run_hooks(self, weight: Any) -> None:
        """What stands for ``weight`` is about to get a gradient, which the user's hooks are to see."""
        if id(weight) in self._stands:
            set_hooks(self._stands[id(weight)][1], hooks_of(weight))

    def begin(self) -> None:
        """To be called on all ranks within a backward of user code between steps, which may bring gradients.

        Raises:
            NotImplementedError: tokens are split between the islands of a tensor axis, where ranks have shares of them.
        """
        self._owner.forget()
        if self._backward != current_backward():
            self._backward = current_backward()
            at_end_of_backward(self._end)

    def _end(self) -> None:
        for _, stand in self._stands.values():
            stand.grad = None  # where the weight is, it has come to that
        self._owner.accumulated()


def _shape(weight: Elsewhere) -> list[int]:
    """As the ranks have it that hold it: in parts, along another axis."""
    shape = list(weight.shape)
    if weight.origin.sharding is not None:
        dim, positions, axis = weight.origin.sharding
        shape[dim] = positions.count(axis.rank)
    return shape
