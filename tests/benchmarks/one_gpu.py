"""Each strategy on one GPU, in one process: what its code costs where there is nobody to share with.

A GPT trains in bfloat16 (``precision="bf16-mixed"``) with AdamW on the same batches, by a plain Trainer and by one for
each strategy, all of size 1. The figures are the ratio of the medians of a step's time, waited for by the host, that of
the most memory allocated, and how far the last loss is from the plain Trainer's. ``--compiled`` compiles the blocks
with inductor, ``--small`` shows what is left where there is next to nothing to compute. Needs CUDA::

    python -m tests.benchmarks.one_gpu
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.benchmarks.pipeline_step import GPT, Sizes

SIZES = Sizes(width=2048, length=1024, vocabulary=16384, layers=12)
SMALL = Sizes(width=32, length=64, vocabulary=64, layers=8)
BATCH, WARM = 8, 6
STRATEGIES: dict[str, Any] = {
    "tensor": lambda: TensorParallelStrategy(1),
    "pipeline": lambda: PipelineParallelStrategy(1, microbatches=1),
    "pipeline, 4 microbatches": lambda: PipelineParallelStrategy(1, microbatches=4),
    "sequence": lambda: SequenceParallelStrategy(1),
    "placement": lambda: LayerPlacementStrategy({"tokens": 0, "positions": 0, "blocks": 0, "norm": 0, "head": 0}),
    "data, fsdp": lambda: HybridParallelStrategy(data_parallel_size=1, data_parallel="fsdp"),
}


class Steps(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss = float("nan")

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        self.loss = float(outputs["loss"])


def trained(strategy: Any, sizes: Sizes, steps: int, compiled: bool) -> tuple[float, int, float]:
    """The median of a step's time, the most bytes allocated, and the last loss."""
    torch.manual_seed(0)
    module, taken = GPT(sizes), Steps()
    if compiled:
        for block in module.blocks:
            block.compile()
    ids: list[Tensor] = [torch.randint(0, sizes.vocabulary, (BATCH, sizes.length)) for _ in range(WARM + steps)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(
        strategy=strategy, accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=1, callbacks=[taken],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(ids, batch_size=None))  # type: ignore[arg-type]
    return statistics.median(taken.seconds[WARM:]), torch.cuda.max_memory_allocated(), taken.loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    sizes = SMALL if options.small else SIZES
    plain = trained("auto", sizes, options.steps, options.compiled)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a plain Trainer: {plain[0] * 1e3:.1f} ms a step, "
        f"{plain[1] / 1e9:.2f} GB, loss {plain[2]:.6f}",
        flush=True,
    )
    for name, strategy in {"plain again": lambda: "auto", **STRATEGIES}.items():
        try:
            seconds, memory, loss = trained(strategy(), sizes, options.steps, options.compiled)
        except Exception as error:
            print(f"{name:26} {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        print(
            f"{name:26} time {seconds / plain[0]:.3f}, memory {memory / plain[1]:.3f}, loss {loss - plain[2]:+.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
