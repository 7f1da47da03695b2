"""What LightningModules share: the optimizer, what is logged, what is predicted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Base(LightningModule):
    """What most LightningModules share: AdamW with a schedule, losses logged by step and by epoch."""

    eps = 1e-8

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("last_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=self.eps)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Classifier(Base):
    """Cross-entropy and torchmetrics accuracy; predictions are a dict."""

    def __init__(self, net: nn.Module | None = None, classes: int = 5) -> None:
        super().__init__()
        if net is not None:
            self.net = net
        self.train_accuracy = MulticlassAccuracy(classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(classes, average="macro")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, sync_dist=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_largest": logits.max()}, sync_dist=True)
        self.log("val_samples", float(len(y)), on_epoch=True, reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "probability": logits.softmax(-1), "label": logits.argmax(-1)}


class Regression(Base):
    """Mean squared error."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        if net is not None:
            self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)
