"""The job that `tests.endurance.signals` sends signals to: a small GPT in float64, whose phases each take a while."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)

STRATEGIES: dict[str, tuple[int, Any]] = {
    "tensor": (2, TensorParallelStrategy),
    "pipeline": (2, lambda: PipelineParallelStrategy(microbatches=2)),
    "sequence": (2, SequenceParallelStrategy),
    "placement": (2, lambda: LayerPlacementStrategy({"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1})),
    "fsdp": (2, lambda: HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp")),
    "tensor x pipeline": (
        4,
        lambda: HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
    ),
}
"""How many ranks, and what makes the strategy."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, d // 2).unbind(2)
        y = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(L.LightningModule):
    """Args:
    folder: gets a file as training begins.
    pause: seconds that a step takes, at least.
    """

    def __init__(self, folder: Path, pause: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.folder, self.pause = folder, pause
        self.embed, self.blocks, self.head = nn.Embedding(32, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 32)

    def setup(self, stage: str) -> None:
        (self.folder / f"began-{os.environ['LOCAL_RANK']}").touch()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor) -> Tensor:
        time.sleep(self.pause)
        return nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        (self.folder / "trained").touch()

    def validation_step(self, batch: Tensor) -> None:
        time.sleep(self.pause)
        self.log("loss", nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Loader(DataLoader):
    """One that a run can resume within an epoch, as torchdata's ``StatefulDataLoader``."""

    given = skipped = 0

    def __iter__(self) -> Any:
        skipped, self.skipped = self.skipped, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= skipped:
                self.given = i + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = self.skipped = state["given"]


class Told(Callback):
    """Notes the exception that callbacks are given, and where the run stood."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        stage = "none" if trainer.state.stage is None else trainer.state.stage.value
        rank = os.environ.get("LOCAL_RANK", "parent")
        self.folder.joinpath(f"told-{rank}").write_text(f"{type(exception).__name__} {stage}")


def fit(strategy: str, folder: Path, rank: int, resume: str | None, slurm: bool, pause: float) -> None:
    """Run one rank; the first one writes the weights to ``folder / "final.pt"`` at the end.

    Args:
        strategy: a key of `STRATEGIES`.
        folder: gets checkpoints and notes.
        rank: of ``MASTER_ADDR`` and ``MASTER_PORT``'s job.
        resume: for ``fit(ckpt_path=...)``.
        slurm: whether it runs as under SLURM, whose commands are found in ``folder``.
        pause: see `Net`.
    """
    world, make = STRATEGIES[strategy]
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1")
    if slurm:
        numbers = dict(NTASKS=world, NTASKS_PER_NODE=world, PROCID=rank, LOCALID=rank, NODEID=0, NNODES=1, JOB_ID=4711)
        os.environ.update({f"SLURM_{name}": str(value) for name, value in numbers.items()}, SLURM_JOB_NAME="job")
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (48, 8), generator=generator)
    saving = ModelCheckpoint(folder / "checkpoints", filename="kept-{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = L.Trainer(
        strategy=make(),
        accelerator="cpu",
        devices=world,
        max_epochs=3,
        val_check_interval=2,
        num_sanity_val_steps=1,
        callbacks=[saving, Told(folder)],
        default_root_dir=folder,
        plugins=[SLURMEnvironment()] if slurm else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net(folder, pause)
    stateful = list(STRATEGIES).index(strategy) % 2  # else its place is found by the checkpoint's generators
    loader = Loader(tokens, batch_size=4) if stateful else DataLoader(tokens, batch_size=4, shuffle=True)  # type: ignore
    trainer.fit(net, loader, Loader(tokens[:12], batch_size=4), ckpt_path=resume)
    if rank == 0:
        torch.save(net.state_dict(), folder / "final.pt")


def become(log: Path) -> None:
    """In a fork: write to ``log``, with signals as a fresh process has them."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
