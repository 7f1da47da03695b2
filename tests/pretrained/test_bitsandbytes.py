"""Layers of bitsandbytes itself, where it is installed: what its CPU kernels round is all that may differ."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.sharded.packed_parameters import constituents, is_packed
from tests.helpers.pool import Pool, RanksFailedError
from tests.pretrained.adapted import ALL, BATCH, LAYOUTS, LENGTH, REPLICAS, STEPS, WORDS

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")


class Tuned(LightningModule):
    """A Llama whose layers are quantized, under LoRA; in evaluation mode, as `from_pretrained` gives it."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=WORDS, pad_token_id=0, max_position_embeddings=64,
            )
        )  # fmt: skip
        for name, layer in list(base.named_modules()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                base.set_submodule(name, _quantized(layer, bits))
        torch.manual_seed(3)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=ALL, init_lora_weights=False)
        self.model = peft.get_peft_model(base, config).eval()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * self.trainer.accumulate_grad_batches)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def _quantized(layer: nn.Linear, bits: int) -> nn.Module:
    sizes = layer.in_features, layer.out_features
    if bits == 4:
        new: Any = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    else:
        new = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
    new.load_state_dict(layer.state_dict())
    done: nn.Module = new.to("cpu")
    return done


def _trained(bits: int, layout: str | None, replicas: int) -> dict[str, Any]:
    world, strategy = LAYOUTS[layout] if layout else (1, lambda: "auto")
    module = Tuned(bits)
    tokens = torch.randint(3, WORDS, (STEPS, replicas, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = tokens[:, int(os.environ["RANK"]) % replicas] if layout else tokens.flatten(0, 1)
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy(), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=1 if layout else replicas,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(mine, batch_size=None))
    packed = [part.clone() for p in module.parameters() if is_packed(p) for part in constituents(p)]
    adapter = {name: x.clone() for name, x in peft.get_peft_model_state_dict(module.model).items()}
    return {"losses": module.losses, "packed": packed, "adapter": adapter}


@pytest.mark.parametrize("layout", ["tensor", "sequence", "fsdp"])
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_over_layers_of_bitsandbytes_train_as_on_one_device(pool: Pool, bits: int, layout: str) -> None:
    replicas = REPLICAS.get(layout, 1)
    (one,) = pool.run(1, _trained, bits, None, replicas)
    told = pool.run(2, _trained, bits, layout, replicas)
    losses = torch.tensor([rank["losses"] for rank in told]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(one["losses"]).view(STEPS, -1).mean(1), rtol=1e-4, atol=0)
    for rank in told:
        assert all(torch.equal(x, y) for x, y in zip(rank["packed"], one["packed"], strict=True))
        torch.testing.assert_close(rank["adapter"], one["adapter"], rtol=0, atol=1e-4)


def test_a_pipeline_refuses_layers_of_bitsandbytes_by_name(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"is a Params4bit of uint8 .* without quantization"):
        pool.run(2, _trained, 4, "pipeline", 1)
