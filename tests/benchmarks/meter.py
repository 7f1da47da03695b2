"""What a step of a benchmark takes on all ranks: time, processor time, bytes."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.helpers.live_bytes import LiveBytes

WARM = 3  # steps of each side before the first that counts
SECONDS, PROCESSOR, BYTES = 0, 1, 2  # what is taken of a step


class _Live(LiveBytes):
    """Of a DTensor its local part counts, which its own dispatch makes while this mode is on again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Meter:
    """What a step takes: seconds, processor time of all ranks, and where asked for the most bytes that it made.

    Bytes are those of tensors that a rank made in the step, while they live, of the rank that has most: activations,
    gradients and what is gathered or sent, not weights and the optimizer's state, which were there.
    """

    def start(self, bytes_too: bool = False) -> None:
        gc.collect()
        dist.barrier()
        self.live = _Live() if bytes_too else None
        if self.live is not None:
            self.live.__enter__()
        self.began = clocks()

    def drop(self) -> None:
        """Nothing comes of the step."""
        if self.live is not None:
            self.live.__exit__(None, None, None)

    def stop(self) -> list[float]:
        self.drop()
        dist.barrier()
        taken = since(self.began)
        most = torch.tensor(self.live.peak if self.live is not None else 0, dtype=torch.float64, device=device())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [*taken, float(most)]


def device() -> torch.device:
    """That of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def clocks() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> list[float]:
    """Seconds that have passed, and seconds of the processor that all ranks have taken."""
    now = clocks()
    used = torch.tensor(now[1] - began[1], dtype=torch.float64, device=device())
    dist.all_reduce(used)
    return [now[0] - began[0], float(used)]
