"""Text that a model generates while it is trained, evaluated and asked: one device's tokens under every layout."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_par import HybridParallelStrategy, LayerPlacementStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

VOCABULARY = 48
PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])


class Blocks(nn.Module):
    """Written by hand: no cache, a loop of as many turns as asked for, and weights that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Parameter(torch.randn(96, 16) * 0.1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        n = input_ids.shape[1]
        x = self.embedding(input_ids) + self.positions[:n]
        mask = nn.Transformer.generate_square_subsequent_mask(n, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def generate(self, tokens: Tensor, max_new_tokens: int, do_sample: bool, **kwargs: Any) -> Tensor:
        for _ in range(max_new_tokens):
            chances = self(tokens)[:, -1].softmax(-1)
            new = torch.multinomial(chances, 1) if do_sample else chances.argmax(-1, keepdim=True)
            if bool((new < 0).any()):
                break
            tokens = torch.cat([tokens, new], 1)
        return tokens


def _model(name: str) -> nn.Module:
    same: dict[str, Any] = dict(vocab_size=VOCABULARY, eos_token_id=2, pad_token_id=0)
    if name == "llama":
        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
        return LlamaForCausalLM(LlamaConfig(**same, **sizes, num_key_value_heads=2, bos_token_id=1))  # type: ignore[arg-type]
    if name == "gpt2":
        off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(
            GPT2Config(**same, n_positions=96, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, **off)
        )
    if name == "t5":
        sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        return T5ForConditionalGeneration(T5Config(**same, **sizes, decoder_start_token_id=0, dropout_rate=0.0))  # type: ignore[arg-type]
    return Blocks()


class Writer(L.LightningModule):
    """Keeps its losses, and what it generates, by where and how."""

    def __init__(self, name: str, length: int, where: tuple[str, ...], **how: Any) -> None:
        super().__init__()
        self.model = _model(name)
        self.length, self.where, self.how = length, where, how
        self.texts: dict[str, list[Any]] = {}
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        out = self.model(input_ids=batch, labels=batch)
        return out if isinstance(out, Tensor) else out.loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    @torch.no_grad()
    def write(self, where: str, prompt: Tensor) -> None:
        was = self.model.training
        self.model.eval()
        for sampled in (False, True) if where in self.where else ():
            torch.manual_seed(7)
            made = self.model.generate(  # type: ignore[operator]
                prompt, max_new_tokens=self.length, min_new_tokens=self.length, do_sample=sampled, **self.how
            )
            assert made.shape[1] >= self.length
            self.texts.setdefault(f"{where} {'sampled' if sampled else 'greedy'}", []).append(made.tolist())
        self.model.train(was)

    def on_train_epoch_end(self) -> None:
        self.write("epoch", PROMPT)

    def validation_step(self, batch: Tensor) -> None:
        self.write("validation", batch[:, :3])

    def predict_step(self, batch: Tensor) -> Tensor | None:
        self.write("predict", batch[:, :3])
        return None if "predict" in self.where else self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Callback(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.write("callback", PROMPT)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:  # replicas share out the others
            pl_module.write("predict callback", PROMPT)


def _trainer(layout: dict[str, Any], devices: int, epochs: int = 2) -> L.Trainer:
    parts = layout.get("data_parallel_size", 1)
    strategy = "auto" if devices == 1 else HybridParallelStrategy(**layout)
    if "placement" in layout:
        strategy = LayerPlacementStrategy(layout["placement"])
    return L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="64-true",
        num_sanity_val_steps=0, accumulate_grad_batches=parts if devices == 1 else 1, callbacks=[Callback()],
    )  # fmt: skip


def write(
    name: str, layout: dict[str, Any], devices: int, length: int, where: tuple[str, ...], how: dict[str, Any]
) -> tuple[dict[str, list[Any]], list[float]]:
    L.seed_everything(0, verbose=False)
    module = Writer(name, length, where, **how)
    loader = torch.utils.data.DataLoader(torch.randint(3, VOCABULARY, (4, 8)), batch_size=2)
    trainer = _trainer(layout, devices, epochs=1 if where == ("validation",) else 2)
    if where != ("predict callback",):
        trainer.fit(module, loader, loader if "validation" in where else None)
    if any("predict" in name for name in where):
        trainer.predict(module, loader)
    return module.texts, module.losses


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, dict(tensor_parallel_size=2)),
    "residual": (2, dict(tensor_parallel_size=2, shard_residual=True)),
    "1f1b": (2, dict(pipeline_parallel_size=2, schedule="1f1b")),
    "zbv": (2, dict(pipeline_parallel_size=2, schedule="zbv")),
    "ring": (2, dict(sequence_parallel_size=2, attention="ring")),
    "ulysses": (2, dict(sequence_parallel_size=2, attention="ulysses")),
    "placement": (2, dict(placement="balanced")),
    "fsdp": (2, dict(data_parallel_size=2, data_parallel="fsdp")),
    "data": (2, dict(data_parallel_size=2)),
    "product": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
}
MODELS = ("llama", "gpt2", "t5", "by hand")


def _differences(pool: Pool, name: str, layout: str, length: int, where: tuple[str, ...], **how: Any) -> list[str]:
    devices, arguments = LAYOUTS[layout]
    texts, losses = pool.run(1, write, name, arguments, 1, length, where, how)[0]
    found = []
    for rank, (others, theirs) in enumerate(pool.run(devices, write, name, arguments, devices, length, where, how)):
        found += [f"rank {rank}: {key}" for key in texts if texts[key] != others.get(key)]
        if arguments.get("data_parallel_size", 1) == 1:  # else each replica has losses of its own
            assert theirs == pytest.approx(
                losses, rel=1e-9 if name == "by hand" else 1e-6
            )  # the others cast to float32
    assert len(texts) == 2 * len(where)
    return found


@long()
@slow(but=["tensor-gpt2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_that_hooks_and_callbacks_generate_is_one_devices(pool: Pool, layout: str, name: str) -> None:
    assert _differences(pool, name, layout, 8, ("epoch", "callback")) == []


@slow()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_64_tokens_are_one_devices(pool: Pool, layout: str) -> None:
    assert _differences(pool, "gpt2", layout, 64, ("epoch",)) == []


@slow()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beams_are_one_devices(pool: Pool, layout: str) -> None:
    assert _differences(pool, "gpt2", layout, 8, ("epoch",), num_beams=2) == []


@slow(but=["tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_that_a_callback_generates_while_predicting_is_one_devices(pool: Pool, layout: str) -> None:
    assert _differences(pool, "gpt2", layout, 8, ("predict callback",)) == []


SPLIT = [layout for layout in LAYOUTS if layout not in ("data", "fsdp")]  # else each replica has batches of its own


@long()
@slow(but=["1f1b-gpt2"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "by hand"])
@pytest.mark.parametrize("layout", SPLIT)
def test_text_that_a_validation_step_generates_is_one_devices(pool: Pool, layout: str, name: str) -> None:
    assert _differences(pool, name, layout, 6, ("validation",)) == []


@slow()
@pytest.mark.parametrize("layout", SPLIT)
def test_text_that_a_predict_step_generates_is_one_devices(pool: Pool, layout: str) -> None:
    assert _differences(pool, "gpt2", layout, 6, ("predict",)) == []


class Alone(Writer):
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.began = time.monotonic()
            self.write("alone", PROMPT)

    def on_exception(self, trainer: Any, exception: BaseException) -> None:
        if self.trainer.is_global_zero:
            raise RuntimeError(f"after {time.monotonic() - self.began:.1f} s: {exception}")


class SeesExceptions(L.Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        pl_module.on_exception(trainer, exception)


def alone(layout: dict[str, Any]) -> None:
    L.seed_everything(0, verbose=False)
    trainer = _trainer(layout, 2)
    trainer.callbacks.append(SeesExceptions())
    loader = torch.utils.data.DataLoader(torch.randint(3, VOCABULARY, (4, 8)), batch_size=2)
    trainer.fit(Alone("gpt2", 4, ("alone",)), loader)


@long()
@slow(but=["1f1b"])
@pytest.mark.parametrize("layout", ["1f1b", "tensor", "fsdp"])
def test_a_rank_that_generates_alone_is_told_at_once(pool: Pool, layout: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, alone, LAYOUTS[layout][1], until=0)
    report = failed.value.reports[0]
    assert "waits in vain for rank 1: rank 1 came to the next" in report
    assert float(report.rpartition("RuntimeError: after ")[2].split()[0]) < 5
