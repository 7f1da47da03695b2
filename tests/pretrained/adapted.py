"""Adapters of `peft` around a tiny Llama: how they are trained, and what is kept of that."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
    ledger,
)
from lightning_par.sharded.patches.float_casts import all_in_float64
from lightning_par.sharded.tensor import leaf

BATCH, LENGTH, WORDS, STEPS = 4, 8, 96, 3
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "tensor": (2, lambda: TensorParallelStrategy(2)),
    "residual": (2, lambda: TensorParallelStrategy(2, shard_residual=True)),
    "pipeline": (2, lambda: PipelineParallelStrategy(2, microbatches=2)),
    "sequence": (2, lambda: SequenceParallelStrategy(2)),
    "placement": (2, lambda: LayerPlacementStrategy("balanced")),
    "fsdp": (2, lambda: HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp")),
    "data": (2, lambda: HybridParallelStrategy(data_parallel_size=2)),
    "pipeline-tensor": (4, lambda: HybridParallelStrategy(pipeline_parallel_size=2, tensor_parallel_size=2)),
}
REPLICAS = {"fsdp": 2, "data": 2}


def _lora(model: Any, **more: Any) -> Any:
    arguments = dict(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=ALL) | more
    return peft.get_peft_model(model, peft.LoraConfig(**arguments))


def _several(model: Any) -> Any:
    tuned = _lora(model)
    tuned.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"]))
    tuned.set_adapter("other")
    return tuned


def _other(kind: type, **arguments: Any) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **arguments))


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "lora": _lora,
    "lora_last": lambda model: _lora(model, layers_to_transform=[1]),
    "lora_first": lambda model: _lora(model, layers_to_transform=[0]),
    "dora": lambda model: _lora(model, use_dora=True),
    "several": _several,
    "saved": lambda model: _lora(model, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": _other(peft.IA3Config),
    "prompt": _other(peft.PromptTuningConfig, num_virtual_tokens=3),
}


def base_model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=WORDS, pad_token_id=0, max_position_embeddings=64,
        )
    )  # fmt: skip


class Tuned(LightningModule):
    """As a user writes it, and what is seen of it in hooks."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        self.model = ADAPTERS[adapter](base_model()).train()
        with torch.no_grad():  # half of an adapter begins at zero, and hides the gradients of the other
            for p in self.model.parameters():
                if p.requires_grad and not p.any():
                    p.normal_(std=0.1)
        self.losses: list[float] = []
        self.frozen_gradients: list[str] = []
        self.states: list[str] = []
        self.without: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.frozen_gradients += [
            name for name, p in self.named_parameters() if not p.requires_grad and p.grad is not None
        ]

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * self.trainer.accumulate_grad_batches)

    def on_train_epoch_end(self) -> None:
        names = {id(p): name for name, p in self.named_parameters()}
        optimizer: Any = self.trainer.optimizers[0]
        self.states = sorted(names[id(p)] for p in optimizer.state)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LastStep(Callback):
    """What moves in the last step, behind all that comes once, and what this rank then holds."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - 1:
            self.context = ledger()
            self.moved = self.context.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - 1:
            self.context.__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        self.trained = sum(leaf(p).numel() for p in pl_module.parameters() if p.requires_grad)
        self.states = sum(leaf(x).numel() for state in optimizer.state.values() for x in state.values() if x.ndim)


class Asking(Tuned):
    """Runs the base model in a hook."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        tokens = torch.arange(3, 3 + LENGTH)[None]
        with torch.no_grad(), self.model.disable_adapter():
            self.without = self.model(input_ids=tokens, use_cache=False).logits.clone()


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.double(), y.double())


def trained(adapter: str, layout: str | None, asking: bool = False, replicas: int = 1) -> dict[str, Any]:
    """What a fit came to.

    Args:
        adapter: of `ADAPTERS`.
        layout: of `LAYOUTS`, or None for one device.
        asking: whether the base model is run in a hook.
        replicas: one device accumulates over as many batches.
    """
    world, strategy = LAYOUTS[layout] if layout else (1, lambda: "auto")
    module = (Asking if asking else Tuned)(adapter)
    before = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    tokens = torch.randint(3, WORDS, (STEPS * replicas, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = tokens
    if layout and replicas > 1:
        mine = tokens.unflatten(0, (STEPS, replicas))[:, int(os.environ["RANK"]) % replicas]
    last = LastStep()
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy(), precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=1 if layout else replicas, gradient_clip_val=1.0, use_distributed_sampler=False,
        callbacks=[last],
    )  # fmt: skip
    with all_in_float64(), ledger() as moved:
        trainer.fit(module, DataLoader(mine, batch_size=None))
    found = {
        "moved": moved.counts(),
        "transfers": last.moved.transfers,
        "losses": module.losses,
        "frozen_gradients": module.frozen_gradients,
        "states": module.states,
        "trained_elements": last.trained,
        "state_elements": last.states,
        "changed": [name for name, p in module.named_parameters() if name in before and not same(p, before[name])],
        "without": module.without,
    }
    active = module.model.active_adapter
    found["adapter"] = dict(peft.get_peft_model_state_dict(module.model, adapter_name=active))
    if adapter != "prompt":
        found["merged"] = dict(module.model.merge_and_unload().state_dict())
    return found
