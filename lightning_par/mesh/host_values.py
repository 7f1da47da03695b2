"""Small values that the host knows, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.tensor(values, dtype=dtype, device=device)``, for which the host does not wait until the device is done.

    Example::

        assert on_device([1, 0], torch.uint8, torch.device("cpu")).tolist() == [1, 0]
    """
    # CUDA has copied memory that is not pinned before it returns: nothing need be kept for it.
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
