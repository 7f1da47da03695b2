"""The loss that an optimizer is told, where copies of the model have one each: their mean, whose gradient it has.

By a loss a line search finds out how far to go, a Polyak step how large it is, LBFGS when to stop. A copy that went by
its own would take another step than the others, and run its closure another number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.optim.closures import Call
from lightning_par.sharded.tensor import full


def averaged(closure: Call, copies: Axis) -> Call:
    """``closure``, which returns the mean over ``copies``; all of them must call it.

    Args:
        closure: evaluates the loss; what else it returns, as None, is left as it is.
        copies: the copies of the model.

    Example::

        optimizer.step(averaged(closure, groups.data))
    """

    def call() -> Any:
        loss = closure()
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            return loss
        mean = full(loss).clone()  # an optimizer may still go backward from it
        with torch.no_grad():
            mean.copy_(copies.all_reduce_(mean.detach().clone().contiguous(), "optimizer's loss") / copies.size)
        return mean

    return call
