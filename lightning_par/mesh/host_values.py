"""Small values that the host knows, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[float] | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.tensor(values, dtype=dtype, device=device)``, for which the host does not wait until the device is done.

    Example::

        assert on_device([1, 0], torch.uint8, torch.device("cpu")).tolist() == [1, 0]
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
