"""``nn.SyncBatchNorm`` that a model's own code makes, and that names no group: over the copies of the model.

Torch takes all processes: under a tensor axis a batch counted once a rank, and the stages of a pipeline, each of which
has other layers, would wait for one another. With one copy of the model it is a BatchNorm, as in one process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState


def patch() -> Replacement:
    """Of its ``forward``."""
    return Replacement(nn.SyncBatchNorm, "forward", _over_copies)


def _over_copies(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def forward(layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:  # torch's name of it
        copies = RunState.current.copies_of_model if use.on else None
        group = layer.process_group
        if copies is None or not any(group is one for one in (None, dist.group.WORLD, copies.group)):
            return plain(layer, input)  # type: ignore[no-any-return]
        if copies.size == 1 or isinstance(input, FakeTensor):  # a trial is of one replica
            return nn.BatchNorm2d.forward(layer, input)  # type: ignore[arg-type]  # which looks at dims by the layer's own
        layer.process_group = copies.group
        try:
            return plain(layer, input)  # type: ignore[no-any-return]
        finally:
            layer.process_group = group

    return forward
