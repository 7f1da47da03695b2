"""The strict group of ranks that share a real device: tensors are copied to the host when an operation is issued, and
back by who waits for it, on the stream that is current there, as NCCL makes that stream wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.gpu_rules.group import StrictGroup
from tests.gpu_rules.queues import Operation

_IN_PLACE = ("allreduce", "reduce")


class SharedGroup(StrictGroup):
    """See `StrictGroup`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._of_host: dict[int, Tensor] = {}  # the device's, by the copy's id, until the operation is issued

    def _hosts(self, tensors: Sequence[Tensor], message: bool = False) -> list[Tensor]:
        self._check(tensors, message)
        copies = [x.detach().cpu() for x in tensors]
        self._of_host.update({id(copy): x for copy, x in zip(copies, tensors)})
        return copies

    def _issue(self, operation: Operation) -> dist.Work | None:
        written = (*operation.writes, *(operation.reads if operation.kind in _IN_PLACE else ()))
        operation.back = [(self._of_host[id(x)], x) for x in written]
        self._of_host.clear()
        return super()._issue(operation)
