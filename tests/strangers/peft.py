"""Adapters of `peft` around a Llama of `transformers`."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor

from tests.strangers.stranger import Stranger, with_trainer
from tests.strangers.transformers import BATCH, loader_of, texts


class Tuned(LightningModule):
    def __init__(self, config: Any, **arguments: Any) -> None:
        super().__init__()
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        base = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **sizes, num_key_value_heads=2, vocab_size=96, pad_token_id=0, max_position_embeddings=64
            )
        )
        self.model = peft.get_peft_model(base, config, **arguments).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _stranger(config: type, small: bool = True, **arguments: Any) -> Stranger:
    return with_trainer(
        lambda: Tuned(config(task_type="CAUSAL_LM", **arguments)),
        lambda: loader_of(texts()),
        transformer=small,
        sequence=True,
        microbatches=BATCH,
    )


_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

STRANGERS: dict[str, Stranger] = {
    "lora": _stranger(peft.LoraConfig, r=4, target_modules=_ALL),
    # Its norms of weights keep the feed-forwards whole: a rank holds 75 percent under tensor.
    "dora": _stranger(
        peft.LoraConfig, small=False, r=4, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=True
    ),
    "lora_saved": _stranger(peft.LoraConfig, r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": _stranger(peft.IA3Config),
    "prefix": _stranger(peft.PrefixTuningConfig, num_virtual_tokens=3),
    "prompt": _stranger(peft.PromptTuningConfig, num_virtual_tokens=3),
    "loha": _stranger(peft.LoHaConfig, r=2, target_modules=_ALL),
    "oft": _stranger(peft.OFTConfig, oft_block_size=4, target_modules=["q_proj", "v_proj"]),
}
