"""Models of `litgpt`, trained as its tutorial for Lightning does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import litgpt
import litgpt.lora
import torch
from lightning.pytorch import LightningModule
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strangers.stranger import Stranger, with_trainer

SAMPLES, BATCH, LENGTH, WORDS = 48, 8, 16, 96
_SIZES: dict[str, Any] = dict(
    n_layer=2, n_embd=32, n_head=4, block_size=LENGTH, vocab_size=WORDS, padded_vocab_size=WORDS
)


class LitLLM(LightningModule):
    def __init__(self, make: Callable[[], nn.Module], chunk: int) -> None:
        super().__init__()
        self.model, self.chunk = make(), chunk

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.model(tokens)
        loss = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:], chunk_size=self.chunk)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def texts() -> Any:
    x = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    padded = x.masked_fill(torch.arange(LENGTH) >= LENGTH - torch.arange(SAMPLES)[:, None] % 4, -100)
    return DataLoader(torch.utils.data.TensorDataset(x, padded), batch_size=BATCH)


def _stranger(make: Callable[[], nn.Module], chunk: int = 0, microbatches: int = BATCH) -> Stranger:
    return with_trainer(lambda: LitLLM(make, chunk), texts, transformer=True, sequence=True, microbatches=microbatches)


def _lora() -> nn.Module:
    ways = dict(lora_query=True, lora_key=True, lora_value=True, lora_projection=True, lora_mlp=True, lora_head=True)
    config = litgpt.lora.Config.from_name("pythia-14m", **_SIZES, lora_r=4, lora_alpha=8, **ways)
    model = litgpt.lora.GPT(config)
    litgpt.lora.mark_only_lora_as_trainable(model)
    return model


def _of(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: litgpt.GPT(litgpt.Config.from_name(name, **{**_SIZES, **arguments}))


STRANGERS: dict[str, Stranger] = {
    "pythia": _stranger(_of("pythia-14m")),
    "pythia_chunked": _stranger(_of("pythia-14m"), chunk=16),
    "llama3": _stranger(_of("Llama-3.2-1B", n_query_groups=2, intermediate_size=64)),
    "gemma2": _stranger(_of("Gemma-2-2b", n_query_groups=2, intermediate_size=64, head_size=8)),
    "mixtral": _stranger(_of("Mixtral-8x7B-v0.1", n_query_groups=2, intermediate_size=48, n_expert=4)),
    "lora": _stranger(_lora),
}
