"""A language model from first weights to a folder that anyone loads: pretrain, fine-tune with LoRA, generate, export.

    python examples/finetune.py
    python examples/finetune.py --pretrain=sequence_parallel --tune=tensor_parallel
    python examples/finetune.py --devices=1 --pretrain=auto --tune=auto

A small Llama of ``transformers`` learns Python from the standard library's own sources, byte by byte, under one
strategy, and is saved as safetensors. Another module loads it under another strategy and learns with an adapter of
``peft`` to write what the library's docstrings say. While it learns it writes some. In the end the adapter is merged,
and plain ``transformers`` loads the result. Nothing is downloaded; needs ``pip install transformers peft``.

Each module and callback would look the same on one device.
"""

from __future__ import annotations

import argparse
import ast
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from gpt import StandardLibrary, Windows
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 128  # bytes that it sees at once
PROMPT = b"Return the "
VALIDATED = 8  # batches


class Llama(LightningModule):
    """What both trainings have in common: a step, and the bits per byte of held-out text."""

    learning_rate: float
    model: nn.Module

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_bpb", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_bpb", self.loss(batch) / math.log(2), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.learning_rate, betas=(0.9, 0.95))


class Pretrained(Llama):
    """Starts from random weights, and saves those that it ends with."""

    learning_rate = 2e-3

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            sizes: dict[str, Any] = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4)
            heads = dict(num_attention_heads=4, num_key_value_heads=2)
            tokens = dict(vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=0)
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, max_position_embeddings=2 * CONTEXT))

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.model.save_pretrained(self.folder)  # type: ignore[operator]


class Tuned(Llama):
    """Starts from weights in a folder, and trains an adapter on top of them."""

    learning_rate = 1e-2

    def __init__(self, folder: Path, adapter: Path) -> None:
        super().__init__()
        self.folder, self.adapter = folder, adapter

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(LlamaForCausalLM.from_pretrained(self.folder), lora)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.model.save_pretrained(self.adapter)  # type: ignore[operator]


class Writing(Callback):
    """Prints how far it is, and what the model writes."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        text = write(pl_module.model)  # on every rank
        if not trainer.sanity_checking:
            bits = trainer.callback_metrics["val_bpb"].item()
            trainer.print(f"step {trainer.global_step:4d}: {bits:.3f} bits per byte of held-out text: {text!r}")


def write(model: Any, length: int = 48) -> str:
    """What ``model`` goes on with after the prompt; all ranks draw the same."""
    prompt = torch.tensor([list(PROMPT)], device=model.device)
    drawn: dict[str, Any] = dict(do_sample=True, temperature=0.6)
    made = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, **drawn)
    return bytes(made[0].tolist()).decode(errors="replace")


@torch.no_grad()
def bits_per_byte(model: Any, batches: DataLoader[Tensor]) -> float:
    """Of as much text as the trainings validate on."""
    losses = [model(input_ids=batch, labels=batch).loss for batch, _ in zip(batches, range(VALIDATED))]
    return torch.stack(losses).mean().item() / math.log(2)


def docstrings(sources: bytes) -> bytes:
    """All that the docstrings of Python ``sources`` say."""
    tree = ast.parse(sources)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(text for text in texts if text).encode() + b"\n\n"


def loaders(train: list[bytes], held_out: list[bytes]) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    def loader(texts: list[bytes], shuffle: bool) -> DataLoader[Tensor]:
        return DataLoader(Windows(b"".join(texts), CONTEXT), batch_size=16, shuffle=shuffle, drop_last=True)

    return loader(train, True), loader(held_out, False)


def trainer(arguments: argparse.Namespace, strategy: str, steps: int) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=steps,
        val_check_interval=max(1, steps // 3),
        limit_val_batches=VALIDATED,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Writing()],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", default="tensor_parallel", help="strategy of the first training")
    parser.add_argument("--tune", default="pipeline_parallel", help="strategy of the second")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="folder for what is saved")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    pretrained, adapter, merged = (arguments.output / name for name in ("pretrained", "adapter", "merged"))
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    seed_everything(0, verbose=False)
    sources = StandardLibrary().texts()
    train, held_out = [t for i, t in enumerate(sources) if i % 10 != 9], sources[9::10]

    trainer(arguments, arguments.pretrain, arguments.steps).fit(Pretrained(pretrained), *loaders(train, held_out))

    tuned = Tuned(pretrained, adapter)
    prose = loaders(*([docstrings(text) for text in texts] for texts in (train, held_out)))
    tuning = trainer(arguments, arguments.tune, arguments.steps)
    tuning.validate(tuned, prose[1], verbose=False)
    before = tuning.callback_metrics["val_bpb"].item()
    tuning.fit(tuned, *prose)

    if tuning.is_global_zero:  # the module is whole again
        after = tuning.callback_metrics["val_bpb"].item()
        tuned.model.merge_and_unload().save_pretrained(merged)  # type: ignore[operator]
        loaded = LlamaForCausalLM.from_pretrained(merged)
        print(
            f"\nHeld-out docstrings: {before:.3f} bits per byte, and {after:.3f} after {arguments.steps} steps of LoRA."
        )
        print(f"transformers loads {merged}: {bits_per_byte(loaded, prose[1]):.3f}; it writes: {write(loaded)!r}")


if __name__ == "__main__":
    main()
