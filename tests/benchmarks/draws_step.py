"""What ``draws="one_device"`` costs: step times of one run that draws so in every other step, and memory.

A GPT with dropout of embeddings, attention weights and both branches is trained under a layout of two ranks. Each pair
of steps has one of each kind; the figure is the median of their ratios, beside the same without dropout, of which both
steps do the same. With ``--memory`` one run of each kind follows, of which the most resident memory is told::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.draws_step --layout tensor
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.pipeline.program.batch_values import BatchValues

WIDTH, HEADS, LENGTH, BATCH, LAYERS, VOCAB = 256, 4, 128, 8, 4, 256
WARM = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "sequence": dict(sequence_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2, microbatches=4),
}


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        x = x + F.dropout(self.proj(out.transpose(1, 2).flatten(-2)), self.p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.p)


class GPT(LightningModule):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.tokens, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block(p) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.tokens(ids), self.p)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class InTurn(Callback):
    """Every other step draws as by default."""

    def __init__(self, alternates: bool) -> None:
        self.seconds: list[float] = []
        self.alternates, self.draw = alternates, BatchValues.draw

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.alternates:
            # 0 1 1 0: so that neither kind is always the first of a pair
            whole = batch_idx < WARM or batch_idx % 4 in (0, 3)
            trainer.strategy._state.streams.whole = whole  # type: ignore[attr-defined]
            BatchValues.draw = self.draw if whole else lambda *args: None  # type: ignore[method-assign,assignment]
        dist.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()
        self.seconds.append(time.perf_counter() - self.began)
        BatchValues.draw = self.draw  # type: ignore[method-assign]


def fit(layout: str, p: float, pairs: int, draws: Any = "one_device", alternates: bool = True) -> list[float]:
    torch.manual_seed(0)
    turns, steps = InTurn(alternates), WARM + 2 * pairs
    trainer = Trainer(
        strategy=HybridParallelStrategy(**LAYOUTS[layout], draws=draws, process_group_backend="gloo"),
        accelerator="cpu", devices=2, max_steps=steps, callbacks=[turns], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    batches = torch.randint(VOCAB, (steps, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer.fit(GPT(p), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return turns.seconds[WARM:]


def ratio(seconds: list[float]) -> str:
    pairs = [
        (seconds[i], seconds[i + 1]) if i % 4 == 0 else (seconds[i + 1], seconds[i])
        for i in range(0, len(seconds) - 1, 2)
    ]
    found = sorted(a / b for a, b in pairs)
    return f"median {statistics.median(found):.3f} of {len(found)} pairs ({found[0]:.3f} to {found[-1]:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="tensor")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--memory", choices=("per_shard", "one_device"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.memory:
        fit(options.layout, 0.1, 4, options.memory, alternates=False)
        print(f"rank {dist.get_rank()}: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f} MB at most")
        return
    for p in (0.1, 0.0):
        seconds = fit(options.layout, p, options.pairs)
        if dist.get_rank() == 0:
            print(f"{options.layout}, dropout {p}: one_device / per_shard: {ratio(seconds)}")


if __name__ == "__main__":
    main()
