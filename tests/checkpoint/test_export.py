"""Weights of a checkpoint as safetensors: the files that `save_pretrained` of the model on one device writes."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_par.absent.unread import Unread
from lightning_par.checkpoint import export as export_module
from lightning_par.checkpoint.export import export, main
from lightning_par.checkpoint.files import save
from lightning_par.checkpoint.reading import load_whole
from tests.checkpoint.test_checkpoints import Choice, quiet, trainer_for
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

SHARD = 10_000  # bytes: of each model below several files


def _model(name: str) -> Any:
    torch.manual_seed(1)
    same: dict[str, Any] = dict(vocab_size=64, bos_token_id=1, eos_token_id=2)
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=16, **same))
    same |= dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2)
    same |= dict(num_key_value_heads=2, max_position_embeddings=16)
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **same))
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=name == "llama", **same))


class Tuned(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = _model(name)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(32).reshape(4, 8), batch_size=4)


def _trained(layout: str, name: str, path: Path, how: bool) -> None:
    with quiet():
        trainer = trainer_for(layout, path.parent, distributed=how)
        trainer.fit(Tuned(name))
        trainer.save_checkpoint(path)


def _file(model: nn.Module, path: Path, attribute: str = "model", **others: Any) -> Path:
    weights = {f"{attribute}.{name}": x for name, x in model.state_dict().items()}
    save({"state_dict": {**weights, **others.pop("weights", {})}, **others}, str(path))
    return path


def _config(model: Any, folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize("size", ["50GB", SHARD])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "untied", "gpt2", "mixtral"])
def test_of_a_file_it_is_what_save_pretrained_writes(name: str, dtype: Any, size: Any, tmp_path: Path) -> None:
    model = _model(name)
    path, config = _file(model, tmp_path / "a.ckpt"), _config(model, tmp_path / "config")
    export(path, tmp_path / "hf", config=config, dtype=dtype, max_shard_size=size)
    model.to(dtype).save_pretrained(tmp_path / "want", max_shard_size=size)
    assert _contents(tmp_path / "hf") == _contents(tmp_path / "want")
    assert ("model.safetensors" in os.listdir(tmp_path / "hf")) == (size == "50GB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(x, loaded[key]) for key, x in model.state_dict().items())


@slow(but=["llama-tp2", "mixtral-pp2"])
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_of_a_directory_it_is_what_save_pretrained_writes(name: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _trained, layout, name, tmp_path / "a.ckpt", True)
    config = _config(_model(name), tmp_path / "config")
    main([str(tmp_path / "a.ckpt"), f"--output_dir={tmp_path / 'hf'}", f"--config={config}", f"--max_shard_size={SHARD}"])
    module = Tuned(name).double()
    module.load_state_dict(load_whole(str(tmp_path / "a.ckpt"))["state_dict"])
    module.model.save_pretrained(tmp_path / "want", max_shard_size=SHARD)
    assert _contents(tmp_path / "hf") == _contents(tmp_path / "want")
    assert not torch.equal(module.model.lm_head.weight, _model(name).double().lm_head.weight), "nothing was trained"


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_values_are_held_for_one_file(
    dtype: Any, config: bool, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(2, _trained, "tp2", "llama", tmp_path / "a.ckpt", True)
    folder = _config(_model("llama"), tmp_path / "config")
    alive: list[Unread] = []
    copy, held = Unread.__new__, []
    monkeypatch.setattr(Unread, "__new__", copy)
