"""The gradient of a weight that was gathered for a call and is split over the tensor axis, too."""

from __future__ import annotations

import types

from torch import Tensor

from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.fake_tensors import makes_fakes


class StoredGradient:
    """``x.grad`` of what a call has of the weight ``stored`` is that of ``stored``, which lies as that does; see also
    `lightning_par.sharded.patches.tensor_grad`."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def read(self, _: Tensor, frame: types.FrameType) -> Tensor | None:
        if makes_fakes(frame):
            return None
        self.stored.look_at_gradient(frame)
        return self.stored.grad

    def write(self, _: Tensor, value: Tensor | None, frame: types.FrameType) -> None:
        self.stored.look_at_gradient(frame)
        self.stored.grad = value
