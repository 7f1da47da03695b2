"""Image models of `timm`: transformers, convolutions, mixers."""

from __future__ import annotations

from typing import Any

import timm
import timm.optim
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strangers.stranger import Stranger, with_trainer

SAMPLES, BATCH, SIZE, CLASSES = 24, 4, 32, 5


class Classifier(LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return timm.optim.create_optimizer_v2(self.model, opt="adamw", lr=1e-3, weight_decay=0.05)


def images() -> Any:
    x = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.arange(SAMPLES) % CLASSES), batch_size=BATCH)


def _stranger(name: str, arguments: dict[str, Any], **more: Any) -> Stranger:
    def module() -> LightningModule:
        return Classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES, **arguments))

    return with_trainer(module, images, **more)


_TOKENS: dict[str, Any] = dict(transformer=True, sequence=True, microbatches=BATCH)
_VIT: dict[str, Any] = dict(img_size=SIZE, patch_size=8, embed_dim=32, depth=4, num_heads=4)

STRANGERS: dict[str, Stranger] = {
    "vit": _stranger("vit_tiny_patch16_224", _VIT, **_TOKENS),
    "deit3": _stranger("deit3_small_patch16_224", _VIT, **_TOKENS),
    "eva02": _stranger(
        "eva02_tiny_patch14_224",
        _VIT,
        **_TOKENS,
    ),
    "swin": _stranger(
        "swin_tiny_patch4_window7_224",
        dict(img_size=SIZE, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0),
        transformer=True,
        microbatches=BATCH,
    ),
    "mixer": with_trainer(
        lambda: Classifier(
            timm.models.MlpMixer(num_classes=CLASSES, img_size=SIZE, patch_size=8, num_blocks=2, embed_dim=32)
        ),
        images,
        microbatches=BATCH,
    ),
    "convnext": _stranger(
        "convnext_atto", dict(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), drop_path_rate=0.0), microbatches=BATCH
    ),
    "resnet": _stranger("resnet10t", {}, microbatches=1),
    # One ulp in its weights moves a bias by 5e-9 on one device, too.
    "mobilenet": _stranger("mobilenetv3_small_050", {}, microbatches=1, tolerance=1e-8),
}
