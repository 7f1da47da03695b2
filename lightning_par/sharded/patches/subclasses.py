"""``x.as_subclass(kind)``, for which torch asks no ``__torch_function__``: of a sharded tensor the whole one is of the
user's class, and a step of a pipeline has none."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.rules.lookup import announce_gather, user_line
from lightning_par.sharded.tensor import ShardedTensor, full


class OtherClassError(NotImplementedError):
    """A value of a pipeline's model is to be of a class that is none of torch's."""


def patch() -> Replacement:
    """Of `torch.Tensor.as_subclass`."""
    return Replacement(Tensor, "as_subclass", _followed)


def _followed(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def as_subclass(x: Tensor, cls: type) -> Any:
        from lightning_par.pipeline.run.located import Run

        run = Run.current if use.on else None
        if not use.on or run is None and not isinstance(x, ShardedTensor):
            return plain(x, cls)
        if cls is Tensor and (type(x) in (Tensor, FakeTensor) or isinstance(x, ShardedTensor)):
            return x  # of a plain class to user code
        if run is not None and (not run.depth or isinstance(x, FakeTensor)):
            raise OtherClassError(
                f"{user_line()}: a step makes a {cls.__name__} of a tensor (as_subclass), which a pipeline does not "
                "follow from stage to stage; so does torch with what it computes of one. Compute with plain tensors, "
                "of a batch's by `x.as_subclass(torch.Tensor)`, make it behind the step, or use "
                "TensorParallelStrategy."
            )
        if isinstance(x, ShardedTensor):
            announce_gather(plain, [x])
            return plain(full(x), cls)
        return plain(x, cls)

    return as_subclass
