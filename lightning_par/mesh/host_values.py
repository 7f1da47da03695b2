"""Small values that the host knows, on their way to the device, and back once all ranks have had a say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.tensor(values, dtype=dtype, device=device)``, for which the host does not wait until the device is done.

    Example::

        assert on_device([1, 0], torch.uint8, torch.device("cpu")).tolist() == [1, 0]
    """
    # CUDA has copied memory that is not pinned before it returns: nothing need be kept for it.
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def agreed(reduced: Tensor, mine: Sequence[float], axis: Axis) -> list[float]:
    """What a reduction of small values has left, on the host, which waits for the device.

    Args:
        reduced: over the ranks of ``axis``.
        mine: what this rank had given. Of a dry run no other rank is there: all are taken to give the same.
        axis: along which it was.
    """
    return [*mine] if axis.dry else reduced.tolist()
