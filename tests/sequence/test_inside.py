"""Sequences that are made within the model, of images or sounds: found, and cut in the batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy
from lightning_par.sequence.part import TokensPart
from lightning_par.sharded.run_state import RunState
from tests.helpers.models import MODELS
from tests.helpers.models.bases import Classifier
from tests.helpers.models.convolutional import ConvNet
from tests.helpers.models.data import images
from tests.helpers.models.hugging_face import HuggingFace
from tests.helpers.pool import Pool
from tests.helpers.slow import long
from tests.sequence.test_counts import Kept


def big_vit(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=64)
    return t.ViTForImageClassification(t.ViTConfig(**sizes, patch_size=4, num_channels=1, num_labels=5))


class AcrossChannels(nn.Module):
    """Attention over channels, as in XCiT: tokens are its features."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(1, 6, 2, stride=2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2)
        return self.head(((x @ x.mT).softmax(-1) @ x).mean(-1))


class Seen(Kept):
    """The dims of the plan, too."""

    dims: Any = ()
    gathered: tuple[tuple[str, str], ...] = ()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if isinstance(trainer.strategy, SequenceParallelStrategy):
            self.dims = trainer.strategy.parts.of(TokensPart).plan.dims  # type: ignore[union-attr]
            self.gathered = tuple(RunState.current.gathers)


def planned(kind: str, ranks: int) -> tuple[Any, Any, int]:
    """The dims of the plan, what gathered, and the bytes kept for backward, on this rank."""
    module: L.LightningModule
    if kind == "hf_whisper":
        module, data = MODELS[kind].module(), MODELS[kind].data(0)
    elif kind == "big_vit":
        module = HuggingFace(big_vit)
        data = [dict(pixel_values=x, labels=y) for x, y in images(size=64)(0)]
    else:
        module = Classifier(AcrossChannels() if kind == "across_channels" else ConvNet())
        data = images()(0)
    seen = Seen()
    strategy: Any = SequenceParallelStrategy(attention="ring") if ranks > 1 else "auto"
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=ranks, max_steps=1, callbacks=[seen], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    return seen.dims, seen.gathered, seen.nbytes


@long()
def test_patches_of_an_image_are_split_by_its_rows(pool: Pool) -> None:
    ((_, _, alone),) = pool.run(1, planned, "big_vit", 1)
    for dims, gathered, nbytes in pool.run(2, planned, "big_vit", 2):
        assert dims == (2, None) and gathered == ()
        assert nbytes <= 1.05 * alone / 2


@long()
def test_frames_of_a_sound_are_split_beside_the_text(pool: Pool) -> None:
    for dims, gathered, _ in pool.run(2, planned, "hf_whisper", 2):
        assert dims == (2, 1) and gathered == ()


@pytest.mark.parametrize("kind", ["conv_net", "across_channels"])
def test_images_without_attention_over_tokens_stay_whole(kind: str, pool: Pool) -> None:
    for dims, gathered, _ in pool.run(2, planned, kind, 2):
        assert (dims, gathered) == ((None, None), ())
