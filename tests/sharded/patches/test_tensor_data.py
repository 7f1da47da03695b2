"""What is asked where a tensor's ``data`` is set."""

from __future__ import annotations

from typing import Any

import torch

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.patches import tensor_data
from lightning_par.sharded.tensor import ShardedTensor


def test_a_plain_tensor_takes_the_whole_data_of_a_sharded_one() -> None:
    x, patch = torch.zeros(2), tensor_data.patch()
    value: Any = ShardedTensor(torch.ones(2), 0, Positions.of([0, 0]), Axis("tensor", (0,), 0, None))
    patch.install()
    try:
        x.data = value
        assert type(x) is torch.Tensor and x.tolist() == [1, 1]
        x.data = torch.full((2,), 3.0)
        assert x.data.tolist() == [3, 3]
        assert torch.Tensor.data.__get__.__self__.__name__ == "data"  # type: ignore[attr-defined]
    finally:
        patch.undo()
    assert "data" not in vars(torch.Tensor)
