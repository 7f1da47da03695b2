"""Weights of a checkpoint as safetensors: the files that `save_pretrained` of the model on one device writes."""

from __future__ import annotations

import json
import os
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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

from lightning_par.checkpoint.export import export, main
from lightning_par.checkpoint.files import save
from lightning_par.checkpoint.reading import load_whole
from lightning_par.private.storage import trim_memory
from tests.checkpoint.test_checkpoints import Choice, quiet, trainer_for
from tests.helpers.pool import Pool
from tests.helpers.process_memory import anonymous, watched
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
        return MixtralForCausalLM(
            MixtralConfig(num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager", **same)
        )
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


@slow(but=["llama-pp2-whole"])
@pytest.mark.parametrize("layout", ["tp2", "pp2-whole"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_of_a_directory_it_is_what_save_pretrained_writes(name: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _trained, layout, name, tmp_path / "a.ckpt", True)
    config = _config(_model(name), tmp_path / "config")
    main(
        [str(tmp_path / "a.ckpt"), f"--output_dir={tmp_path / 'hf'}", f"--config={config}", f"--max_shard_size={SHARD}"]
    )
    module = Tuned(name).double()
    module.load_state_dict(load_whole(str(tmp_path / "a.ckpt"))["state_dict"])
    module.model.save_pretrained(tmp_path / "want", max_shard_size=SHARD)
    assert _contents(tmp_path / "hf") == _contents(tmp_path / "want")
    assert not torch.equal(module.model.lm_head.weight, _model(name).double().lm_head.weight), "nothing was trained"


class Deep(LightningModule):
    """Layers of 1.8 MB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, vocab_size=64)
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch, use_cache=False).loss

    configure_optimizers, train_dataloader = Tuned.configure_optimizers, Tuned.train_dataloader


def _save_deep(path: Path) -> None:
    with quiet():
        trainer = trainer_for("tp2", path.parent, distributed=True, precision="32-true")
        trainer.fit(Deep(32))
        trainer.save_checkpoint(path)


def _share(path: Path, folder: Path, config: Path | None, dtype: Any) -> float:
    """Of what is written, which share was held at once."""
    small = _config(model := _model("untied"), folder / "small")
    options: dict[str, Any] = dict(dtype=dtype, max_shard_size="2MB")
    export(_file(model, folder / "small.ckpt"), folder / "first", config=config and small, **options)  # all is imported
    trim_memory()
    start = anonymous()
    with watched() as peaks:
        export(path, folder / "second", config=config, **options)
    written = sum((folder / "second" / name).stat().st_size for name in os.listdir(folder / "second"))
    return (peaks["self"] - start) / written


@slow()
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["None", "bfloat16"])
@pytest.mark.parametrize("with_config", [True, False])
def test_values_are_held_for_one_file(with_config: bool, dtype: Any, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _save_deep, tmp_path / "a.ckpt")
    config = _config(Deep(32).model, tmp_path / "config") if with_config else None
    # a process of its own, whose heap has no holes from before
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        share = fresh.submit(_share, tmp_path / "a.ckpt", tmp_path, config, dtype).result()
    assert share < 0.4, share


def test_without_a_config_names_stay_and_the_first_of_two_is_kept(tmp_path: Path) -> None:
    model = _model("llama")
    row = torch.arange(10.0)
    path = _file(model, tmp_path / "a.ckpt", weights={"model.row": row[2:5], "model.rest": row[4:]})
    export(path, tmp_path / "hf", max_shard_size=SHARD)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {k: x for name in set(index["weight_map"].values()) for k, x in load_file(tmp_path / "hf" / name).items()}
    want = {**model.state_dict(), "row": row[2:5], "rest": row[4:]}
    del want["lm_head.weight"]  # tied to the embedding, which comes first
    assert found.keys() == want.keys() == index["weight_map"].keys()
    assert all(torch.equal(x, want[name]) for name, x in found.items())
    assert index["metadata"]["total_parameters"] == sum(x.numel() for x in want.values())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())


def test_the_prefix_is_the_one_attribute_or_said(tmp_path: Path) -> None:
    path = _file(nn.Linear(2, 2), tmp_path / "a.ckpt", "student", weights={"scale": torch.ones(())})
    with pytest.raises(ValueError, match="it may be 'student.', '', which is all"):
        export(path, tmp_path / "hf")
    with pytest.raises(ValueError, match="begins with 'model.'; they begin with student, scale"):
        export(path, tmp_path / "hf", prefix="model.")
    assert not (tmp_path / "hf").exists()
    for prefix, names in (("student.", {"weight", "bias"}), ("", {"student.weight", "student.bias", "scale"})):
        main([str(path), f"--output_dir={tmp_path / prefix / 'hf'}", f"--prefix={prefix}", "--dtype=float16"])
        found = load_file(tmp_path / prefix / "hf" / "model.safetensors")
        assert found.keys() == names and {x.dtype for x in found.values()} == {torch.float16}


def test_where_the_weights_beside_the_config_are_no_weights_it_is_enough(tmp_path: Path) -> None:
    model = _model("llama")
    path, config = _file(model, tmp_path / "a.ckpt"), _config(model, tmp_path / "config")
    (config / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.warns(UserWarning, match="What .*config holds can't be loaded"):
        export(path, tmp_path / "hf", config=config)
    model.save_pretrained(tmp_path / "want")
    assert _contents(tmp_path / "hf") == _contents(tmp_path / "want")


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = _file(_model("llama"), tmp_path / "a.ckpt"), _config(_model("gpt2"), tmp_path / "config")
    with pytest.raises(ValueError, match="not those of .*config.json.*\n.*transformer.wte.weight"):
        export(path, tmp_path / "hf", config=config)
    text = json.loads((config / "config.json").read_text())
    for wrong in (None, ["MyModel"]):
        (config / "config.json").write_text(json.dumps({**text, "architectures": wrong}))
        with pytest.raises(ValueError, match="has to name one class"):
            export(path, tmp_path / "hf", config=config / "config.json")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        export(path, tmp_path / "hf", config=tmp_path)
    with pytest.raises(FileNotFoundError):
        export(tmp_path / "none.ckpt", tmp_path / "hf")
    save({"epoch": 1}, str(tmp_path / "b.ckpt"))
    with pytest.raises(ValueError, match="has no weights"):
        export(tmp_path / "b.ckpt", tmp_path / "hf")
    unsafe = _file(nn.Linear(2, 2), tmp_path / "c.ckpt", hyper_parameters={"choice": Choice("x")})
    with pytest.raises(pickle.UnpicklingError, match="Choice"):
        export(unsafe, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export(unsafe, tmp_path / "hf", weights_only=False)
    with pytest.raises(FileExistsError, match="remove model.safetensors"):
        export(path, tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)  # as where it is not installed
    with pytest.raises(ImportError, match="lightning_par\\[pretrained\\]"):
        export(path, tmp_path / "other")
