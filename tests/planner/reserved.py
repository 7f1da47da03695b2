"""What torch's allocator would reserve on a GPU for dry runs: ``python -m tests.planner.reserved [NAME]``.

Each line has the GB of a rank's live tensors at their most, the GB that `allocator` reserves for them, and the ratio.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch

from lightning_par import dry_run
from lightning_par.planner.memory.live_bytes import LiveBytes
from tests.planner.allocator import Allocator
from tests.planner.models import GPT, Llama

LLAMA = partial(Llama, layers=32, hidden=4096, heads=32, kv=8, ffn=14336, vocab=128256, seq=8192)
SMALL = partial(GPT, layers=22, hidden=2304, heads=24, ffn=9216, vocab=50304, seq=1024, tied=False)
STAGES = {"pipeline_parallel_size": 4, "tensor_parallel_size": 4, "microbatches": 8, "shard_residual": True}
CASES: dict[str, tuple[Any, tuple[int, int], dict[str, Any], int, tuple[int, ...]]] = {
    "gpt": (SMALL, (8, 1024), {}, 1, (0,)),
    "gpt 1f1b": (SMALL, (144, 1024), {"pipeline_parallel_size": 8, "microbatches": 24}, 8, (0, 7)),
    "gpt fsdp": (SMALL, (8, 1024), {"data_parallel": "fsdp"}, 8, (0,)),
    "llama fsdp": (LLAMA, (1, 8192), {"data_parallel": "fsdp"}, 8, (0,)),
    "llama tensor": (LLAMA, (2, 8192), {"tensor_parallel_size": 8, "shard_residual": True}, 8, (0,)),
    "llama stages": (LLAMA, (8, 8192), STAGES, 16, (0, 15)),
    "llama sequence": (LLAMA, (1, 8192), {"sequence_parallel_size": 4, "data_parallel": "fsdp"}, 4, (0,)),
}


class Traced(LiveBytes):
    """Also lists what is made and let go, for `Allocator`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}

    def _made(self, number: int, memory: torch.UntypedStorage) -> None:
        if number not in self._known and memory.nbytes():
            self._numbers[number] = len(self.events)
            self.events.append((len(self.events), memory.nbytes()))
        super()._made(number, memory)

    def _freed(self, number: int, size: int) -> None:
        if number in self._numbers:
            self.events.append((self._numbers.pop(number), -1))
        super()._freed(number, size)


def _traced(made: list[Traced], **given: Any) -> Traced:
    made.append(Traced(**given))
    return made[-1]


def main(names: list[str]) -> None:
    logging.disable(logging.WARNING)
    for name in names or CASES:
        make, size, layout, devices, ranks = CASES[name]
        batch = (torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long))
        for rank in ranks:
            made: list[Traced] = []
            with mock.patch("lightning_par.dry.strategy.LiveBytes", partial(_traced, made)):
                dry_run(make, batch, layout, devices=devices, rank=rank, precision="bf16-mixed")
            found = Allocator()
            found.run(made[-1].events)
            asked, held = found.most_asked / 1e9, found.reserved / 1e9
            print(f"{name:15} rank {rank:2}: {asked:6.2f} GB, {held:6.2f} reserved, {held / asked:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
