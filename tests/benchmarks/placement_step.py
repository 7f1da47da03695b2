"""Step time under `LayerPlacementStrategy`: against the same split written by hand, and against one process.

``--model back_and_forth`` is four linear layers, the first and the last of one process, the two between of another. Its
other side is the same split written by hand with blocking sends and receives; the bar is 1.05. ``--model branches`` is
two equal branches of linear layers, one in each process, and their sum. Its other side is the whole model in the first
process while the second one waits; the bar is 0.65.

Both sides live in two processes of one thread each and train on the same batches with AdamW, ours by a real Trainer.
Each batch is a pair: the Trainer's step, from ``on_train_batch_start`` to ``on_train_batch_end``, and the other side's,
now the one first, now the other; both end with a barrier. The figure is the median of the ratios of the pairs. The
losses of the last batch are printed, too, as they must agree. Run it on an idle machine with two cores; 15 pairs take
about 2 minutes each::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.placement_step --model back_and_forth
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.placement_step --model branches
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import LayerPlacementStrategy
from tests.benchmarks.meter import SECONDS, WARM, device
from tests.benchmarks.pipeline_step import owned
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.trainer_side import QUIET

WIDTH, BATCH = 4096, 128


class Model(LightningModule):
    """Plain: knows nothing of devices."""

    def training_step(self, x: Tensor) -> Tensor:
        return loss_of(self(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_of(self.parameters())

    @staticmethod
    def optimizer_of(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)


class BackAndForth(Model):
    placement = {"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 0}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        x = torch.relu(self.fc3(x))
        return self.fc4(x)


class Branches(Model):
    placement = {"left": 0, "right": 1}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum(-1).mean()  # of samples alone: a gradient's size is that of any width


class ByHand:
    """`BackAndForth` on two ranks, by sends and receives that wait."""

    def __init__(self, model: BackAndForth) -> None:
        self.outer = dist.get_rank() == 0
        self.layers = nn.ModuleList([model.fc1, model.fc4] if self.outer else [model.fc2, model.fc3]).to(device())
        self.model, self.optimizer = model, model.optimizer_of(self.layers.parameters())
        self.loss = float("nan")

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        first, last = self.layers
        if self.outer:
            h = torch.relu(first(x))
            dist.send(h.detach(), 1)
            y = _received(h)
            loss = loss_of(last(y))
            loss.backward()
            assert y.grad is not None
            dist.send(y.grad, 1)
            h.backward(_received(h).detach())
            self.loss = float(loss)
        else:
            h = _received(x)
            y = torch.relu(last(torch.relu(first(h))))
            dist.send(y.detach(), 0)
            y.backward(_received(y).detach())
            assert h.grad is not None
            dist.send(h.grad, 0)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return owned(self.model, self.layers.parameters())


def _received(like: Tensor) -> Tensor:
    """A leaf of the shape of ``like`` from the other rank."""
    x = torch.empty_like(like)
    dist.recv(x, 1 - dist.get_rank())
    return x.requires_grad_()


class Alone:
    """A whole model on the first rank, while the other waits."""

    def __init__(self, model: Model) -> None:
        self.model, self.optimizer = model, model.configure_optimizers()
        self.loss = float("nan")

    def step(self, x: Tensor) -> None:
        if dist.get_rank() == 0:
            self.optimizer.zero_grad()
            loss = loss_of(self.model(x))
            loss.backward()
            self.optimizer.step()
            self.loss = float(loss)


MODELS: dict[str, tuple[Any, Any]] = {"back_and_forth": (BackAndForth, ByHand), "branches": (Branches, Alone)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="back_and_forth")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--width", type=int, default=WIDTH)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, other = MODELS[options.model]
    x = torch.randn(BATCH, options.width)
    rounds = Rounds({other.__name__: other})
    trainer = Trainer(
        strategy=LayerPlacementStrategy(kind.placement, process_group_backend="gloo"),
        accelerator="cpu", devices=2, max_steps=WARM + options.pairs, callbacks=[rounds], **QUIET,
    )  # fmt: skip
    trainer.fit(kind(options.width), DataLoader([x] * (WARM + options.pairs), batch_size=None))
    if dist.get_rank() == 0:
        ratio = Ratio.of(rounds.ours, rounds.others[other.__name__], SECONDS)
        print(f"{options.model}: losses {rounds.loss:.6f} and {rounds.sides[other.__name__].loss:.6f}")
        print(f"ours / {other.__name__}: {ratio}")


if __name__ == "__main__":
    main()
