"""Step time of data parallelism alone, against Lightning's own DDP.

Both sides are real Trainers of two processes of one thread each, which train the same transformer on the same batches
with AdamW: ours by ``HybridParallelStrategy(data_parallel_size=2)``, the other with ``strategy="ddp"``, in a thread of
its own that goes on only when it is its turn. Each batch is a pair: our step and then theirs, or the other way round;
both end with a barrier. The figure is the median of the ratios of the pairs; the bar is 1.05. The losses of the last
batch are printed, too, as they must agree. Run it on an idle machine with two cores; it takes about a minute::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.data_step
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.benchmarks.meter import SECONDS, WARM
from tests.benchmarks.placement_step import loss_of
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.trainer_side import QUIET, TrainerSide

WIDTH, LENGTH, BATCH, LAYERS = 256, 128, 8, 6


class Model(LightningModule):
    def __init__(self, batches: Tensor) -> None:
        super().__init__()
        self.batches = batches
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def training_step(self, x: Tensor) -> Tensor:
        return loss_of(self.layers(x))

    def loader(self) -> DataLoader:  # type: ignore[type-arg]
        return DataLoader(self.batches.unbind(), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = WARM + options.pairs
    here: dict[str, Any] = dict(accelerator="cpu", devices=2)
    model = Model(torch.randn(steps, BATCH, LENGTH, WIDTH))
    rounds = Rounds({"DDP": lambda model: TrainerSide(model, model.batches.unbind(), lambda: "ddp", here)})
    trainer = Trainer(
        strategy=HybridParallelStrategy(process_group_backend="gloo"), max_steps=steps, callbacks=[rounds], **QUIET,
        **here,
    )  # fmt: skip
    trainer.fit(model, model.loader())
    if dist.get_rank() == 0:
        print(f"losses {rounds.loss:.6f} and {rounds.sides['DDP'].loss:.6f}")
        print(f"ours / DDP: {Ratio.of(rounds.ours, rounds.others['DDP'], SECONDS)}")


if __name__ == "__main__":
    main()
