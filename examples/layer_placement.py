"""You say which layer runs where: two small nets read scikit-learn's 1797 handwritten digits, no download.

    python examples/layer_placement.py              # two processes
    python examples/layer_placement.py --devices 1  # the same nets on one device, with the same results

The first net goes back and forth: its first and last layer are on device 0, the two between on device 1. The second has
two branches, one on each device, that run at the same time. Their code is plain: only the Trainer is told.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_par import LayerPlacementStrategy


class Digits(L.LightningModule):
    """Training and validation, for any net that makes ten scores of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, digit = batch
        loss = F.cross_entropy(self(image), digit)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        image, digit = batch
        scores = self(image)
        self.accuracy(scores, digit)
        self.log("val_loss", F.cross_entropy(scores, digit))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class BackAndForth(Digits):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 64)
        self.fc4 = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.fc1(image.flatten(1)))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return self.fc4(x)


class TwoBranches(Digits):
    """A convolutional and a fully connected branch, joined by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.whole = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.head = nn.Linear(32 + 128, 10)

    def forward(self, image: Tensor) -> Tensor:
        near = self.pixels(image).mean(dim=(2, 3))
        far = self.whole(image)
        return self.head(torch.cat([near, far], dim=1))


NETS: list[tuple[type[Digits], dict[str, int]]] = [
    (BackAndForth, {"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 0}),
    (TwoBranches, {"pixels": 0, "whole": 1, "head": 1}),
]


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Images with values from 0 to 1; a fifth of them is held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(digits.target))
    train, val = random_split(whole, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    for net, placement in NETS:
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            strategy=LayerPlacementStrategy(placement) if options.devices > 1 else "auto",
            devices=options.devices,
            accelerator=options.accelerator,
            max_epochs=options.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(net(), *loaders())
        if trainer.is_global_zero:
            accuracy, loss = (float(trainer.callback_metrics[name]) for name in ("val_accuracy", "val_loss"))
            print(f"\n{net.__name__} reads {accuracy:.1%} of the held-out digits; validation loss {loss:.6f}.\n")


if __name__ == "__main__":
    main()
