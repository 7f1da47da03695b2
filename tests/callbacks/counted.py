"""A model of which throughput is counted, and the layouts."""

from __future__ import annotations

from typing import Any

import torch

import lightning_par.pl
from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)

BATCH, TOKENS, FLOPS, STEPS = 4, 6, 10, 4

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "data": lambda: HybridParallelStrategy(data_parallel_size=2),
    "fsdp": lambda: HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
    "tensor": lambda: TensorParallelStrategy(2),
    "pipeline": lambda: PipelineParallelStrategy(2, microbatches=2),
    "sequence": lambda: SequenceParallelStrategy(2),
    "placement": lambda: LayerPlacementStrategy({"embed": 0, "inner": 1, "head": 1}),
    "tensor-data": lambda: TensorParallelStrategy(2),  # on four ranks
    "pipeline-tensor": lambda: HybridParallelStrategy(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
    "pytorch_lightning": lambda: lightning_par.pl.TensorParallelStrategy(2),
}
REPLICAS = {"ddp": 2, "data": 2, "fsdp": 2, "tensor-data": 2}


def make_module(pl: Any) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc]
        flops_per_batch = FLOPS

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            self.inner = torch.nn.Linear(8, 16)
            self.head = torch.nn.Linear(16, 11)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            logits = self.head(torch.relu(self.inner(self.embed(batch))))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Model()
