"""Fits on two ranks again and again, each in two fresh processes that leave by the interpreter's own exit.

Run as ``python -m tests.helpers.exits RUNS``; prints the exit codes. Every other run is of a pipeline. The processes
are forked off one that has done its imports, but nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 64))

    def training_step(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(rank: int, port: int, kind: Any) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already
    torch.set_num_threads(1)
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(strategy=kind(), accelerator="cpu", devices=2, max_steps=3, **options)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randint(0, 64, (12, 5)), batch_size=4))


def main() -> None:
    codes = []
    gc.freeze()  # else each process copies all of it, as it collects
    for run in range(int(sys.argv[1])):
        kind = (TensorParallelStrategy, PipelineParallelStrategy)[run % 2]
        told, tell = os.pipe()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                sys.stdout = sys.stderr = open(os.devnull, "w")
                return fit(rank, int.from_bytes(os.read(told, 4), "big"), kind)
            children.append(child)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its thread is in no fork
        os.write(tell, store.port.to_bytes(4, "big") * 2)
        codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        del store
    print(*codes)


if __name__ == "__main__":
    main()
