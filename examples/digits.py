"""A small vision transformer reads handwritten digits: scikit-learn's 1797 images of 8 x 8 pixels, no download.

    python examples/digits.py fit
    python examples/digits.py fit --trainer.strategy=tensor_parallel --trainer.devices=2
    python examples/digits.py fit --trainer.strategy=pipeline_parallel --trainer.devices=2

The strategy is all that changes between one device and many: nothing below knows about parallelism.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class ViT(LightningModule):
    """A vision transformer with a mean over patches at its end.

    Args:
        width: features of a patch, a multiple of ``heads``.
        heads: attention heads.
        depth: transformer layers.
        patch: side of a patch in pixels, a divisor of 8.
        dropout: share of activations dropped in training.
        learning_rate: AdamW's at first; it falls to zero along a cosine.
    """

    def __init__(
        self,
        width: int = 64,
        heads: int = 4,
        depth: int = 3,
        patch: int = 2,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((8 // patch) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, image: Tensor) -> Tensor:
        """Scores of the ten digits, (B, 10), from images, (B, 1, 8, 8)."""
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, digit = batch
        loss = F.cross_entropy(self(image), digit)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        image, digit = batch
        scores = self(image)
        self.val_accuracy(scores, digit)
        self.log("val_loss", F.cross_entropy(scores, digit), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Digits(LightningDataModule):
    """Images of digits with values from 0 to 1, a fifth of them held out.

    Args:
        batch_size: images in a batch.
        num_workers: processes that load.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        whole = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.val = random_split(whole, [0.8, 0.2], generator=torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.train, batch_size=self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)


class CLI(LightningCLI):
    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            accuracy = self.trainer.callback_metrics.get("val_accuracy", math.nan)  # not there where no validation ran
            print(f"\nReads {accuracy:.1%} of the held-out digits right after {self.trainer.current_epoch} epochs.")


def main() -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    CLI(
        ViT,
        Digits,
        seed_everything_default=0,
        trainer_defaults={
            "max_epochs": 20,
            "log_every_n_steps": 10,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}},
        },
    )


if __name__ == "__main__":
    main()
