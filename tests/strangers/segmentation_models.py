"""Encoders and decoders of `segmentation-models-pytorch`, with its own losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import segmentation_models_pytorch as smp
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strangers.stranger import Stranger, with_trainer

SAMPLES, BATCH, SIZE, CLASSES = 18, 3, 64, 3  # at size 32 batch norms see two values, and one ulp moves a loss by 1e-2
ENCODER = "mobilenet_v2"


class Segmenter(LightningModule):
    """As in the package's examples of Lightning."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss
        self.training_step_outputs: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, mask = batch
        logits = self.model(image)
        loss = self.loss_fn(logits, mask)
        predicted = logits.argmax(dim=1)
        tp, fp, fn, tn = smp.metrics.get_stats(predicted, mask, mode="multiclass", num_classes=CLASSES)
        self.training_step_outputs.append({"tp": tp, "fp": fp, "fn": fn, "tn": tn})
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        tp, fp, fn, tn = (torch.cat([x[key] for x in self.training_step_outputs]) for key in ("tp", "fp", "fn", "tn"))
        self.log("train_iou", smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro"))
        self.training_step_outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def scenes() -> Any:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=g)
    return DataLoader(TensorDataset(x, torch.randint(0, CLASSES, (SAMPLES, SIZE, SIZE), generator=g)), batch_size=BATCH)


def _dry(model: nn.Module) -> nn.Module:
    """Without dropout, whose masks are a layout's own."""
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
        elif hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model


def _stranger(model: Callable[..., nn.Module], loss: Callable[[], nn.Module], **more: Any) -> Stranger:
    def module() -> LightningModule:
        arguments = dict(encoder_name=ENCODER, encoder_weights=None, in_channels=3, classes=CLASSES)
        return Segmenter(_dry(model(**arguments)), loss())

    return with_trainer(module, scenes, **more)


def _dice() -> nn.Module:
    return smp.losses.DiceLoss(smp.losses.MULTICLASS_MODE, from_logits=True)


STRANGERS: dict[str, Stranger] = {
    "unet_dice": _stranger(partial(smp.Unet, decoder_channels=(48, 32, 24, 16, 8)), _dice, microbatches=1),
    "fpn_focal": _stranger(smp.FPN, lambda: smp.losses.FocalLoss(smp.losses.MULTICLASS_MODE), microbatches=1),
    "deeplab_jaccard": _stranger(
        partial(smp.DeepLabV3Plus, decoder_channels=32),
        lambda: smp.losses.JaccardLoss(smp.losses.MULTICLASS_MODE),
        microbatches=1,
    ),
    "segformer_soft": _stranger(
        smp.Segformer, lambda: smp.losses.SoftCrossEntropyLoss(smooth_factor=0.1), microbatches=1
    ),
    "linknet_lovasz": _stranger(smp.Linknet, lambda: smp.losses.LovaszLoss(smp.losses.MULTICLASS_MODE), microbatches=1),
}
