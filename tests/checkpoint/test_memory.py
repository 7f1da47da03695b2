"""Saving and loading hold no more than what a rank holds anyway, and the largest tensor."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.storage import trim_memory
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.tensor import leaf
from tests.checkpoint.test_checkpoints import quiet
from tests.helpers.pool import Pool
from tests.helpers.process_memory import anonymous, watched
from tests.helpers.slow import slow

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
BLOCKS = {"sgd": 15, "adamw": 5}  # 1 GB
STRATEGIES: dict[str, Any] = {
    "tp2": TensorParallelStrategy,
    "pp2": PipelineParallelStrategy,
    "fsdp2": partial(HybridParallelStrategy, data_parallel_size=2, data_parallel="fsdp"),
    "sp2": SequenceParallelStrategy,
    "pp2-fsdp2": partial(
        HybridParallelStrategy,
        data_parallel_size=2,
        pipeline_parallel_size=2,
        microbatches=2,
        data_parallel="fsdp",
        reshard_after_forward=True,
    ),
}
SHARES = dict.fromkeys(STRATEGIES, 2) | {"sp2": 1, "pp2-fsdp2": 4}  # in how many the weights are cut


class Blocks(LightningModule):
    """``blocks`` of two matrices."""

    def __init__(self, width: int, blocks: int, optimizer: str) -> None:
        super().__init__()
        self.width, self.blocks, self.optimizer = width, blocks, optimizer

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            w = self.width
            sizes = [layer for _ in range(self.blocks) for layer in ((w, 2 * w), (2 * w, w))]
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.ReLU()) for size in sizes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters(), 1e-3)


class Measuring(Callback):
    """How much more anonymous memory there is than before the model, while it is loaded and while it is saved."""

    def __init__(self, folder: Path, start: int, watch: Any, is_last: bool) -> None:
        self.folder, self.start, self.watch, self.is_last = folder, start, watch, is_last
        self.found: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            self.watch.__exit__(None, None, None)
            self._note("load", trainer, self.peaks["self"])
            self._end()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.peaks = self.watch.__enter__()

    def _note(self, kind: str, trainer: Trainer, peak: int) -> None:
        state = [*trainer.lightning_module.parameters(), *tensors_in([*trainer.optimizers[0].state.values()])]
        own = sum(leaf(x).nbytes for x in state if not is_elsewhere(x))
        largest = max(x.numel() * x.element_size() for x in state)
        self.found[kind] = (peak - self.start) / (own + largest)
        self.found["own"] = own

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.ckpt_path is not None:
            return
        strategy: Any = trainer.strategy
        trainer.optimizers[0].zero_grad()
        gc.collect()
        trim_memory()
        for how, kind in ((False, "file"), (True, "folder")):
            strategy.save_distributed_checkpoint = how
            with watched() as peaks:
                trainer.save_checkpoint(self.folder / kind)
            self._note(kind, trainer, peaks["self"])
        self._end()

    def _end(self) -> None:
        if self.is_last:
            raise KeyboardInterrupt  # all is seen, and after a run every rank holds the whole model


def _run(layout: str, optimizer: str, width: int, blocks: int, folder: Path, kind: str | None = None) -> dict[str, Any]:
    is_last = width > 16
    measuring = Measuring(folder, anonymous(), watched(), is_last)
    options: dict[str, Any] = dict(accelerator="cpu", devices=_ranks(layout), logger=False, enable_progress_bar=False)
    trainer = Trainer(
        strategy=STRATEGIES[layout](),
        max_steps=1 if kind is None else 2,
        callbacks=[measuring],
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_train_batches=1,
        **options,
    )
    loader = DataLoader(torch.ones(4, 2, width), batch_size=2)  # type: ignore[arg-type]
    with quiet(), pytest.raises(SystemExit) if is_last else nullcontext():
        trainer.fit(Blocks(width, blocks, optimizer), loader, ckpt_path=kind and folder / kind)
    return measuring.found


def _measured(layout: str, optimizer: str, width: int, folder: Path, kind: str | None = None) -> dict[str, Any]:
    small = folder / "small"
    _run(layout, optimizer, 16, 2, small)  # imports what is needed
    for name in ("file", "folder"):
        _run(layout, optimizer, 16, 2, small, name)
    gc.collect()
    trim_memory()
    return _run(layout, optimizer, width, BLOCKS[optimizer] * SHARES[layout], folder, kind)


def _ranks(layout: str) -> int:
    return max(SHARES[layout], 2)


@slow()
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", STRATEGIES)
def test_a_checkpoint_takes_memory_for_one_tensor(layout: str, optimizer: str, fresh: Pool, tmp_path: Path) -> None:
    found = {}
    for kind in (None, "file", "folder"):
        for rank, ratios in enumerate(
            fresh.run(_ranks(layout), _measured, layout, optimizer, 2048, tmp_path, kind, timeout=300)
        ):
            own = ratios.pop("own")
            found |= {f"{kind or 'save'} {name}, rank {rank}": ratio for name, ratio in ratios.items()}
            assert own > (1 << 30) * 0.93
        fresh.restart()
    print(layout, optimizer, {name: round(ratio, 3) for name, ratio in found.items()})
    assert all(ratio <= 1.1 for ratio in found.values()), found
