"""Weights that are read from files are bitwise those of one device, and each rank reads its own part of them."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_par
from lightning_par.absent.deferred import op_recorder
from lightning_par.absent.deferred.deferred_tensor import is_deferred
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.absent.mapped.file import File
from lightning_par.sharded.tensor import leaf
from tests.helpers.models import MODELS
from tests.helpers.models.hugging_face import HuggingFace
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

CASES = "hf_llama hf_qwen3 hf_gpt2 hf_bert hf_t5 hf_vit hf_whisper hf_mixtral".split()
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2, data_parallel_size=1),
    "pp2": dict(pipeline_parallel_size=2, data_parallel_size=1),
    "sp2": dict(sequence_parallel_size=2, data_parallel_size=1),
    "fsdp2": dict(data_parallel_size=2, data_parallel="fsdp"),
    "tp2-pp2": dict(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=1),
}
OPTIONS: dict[str, Any] = {"hf_mixtral": dict(experts_implementation="eager")}  # the default has no float64
FORMATS = ("one", "many", "bin")
QUIET: dict[str, Any] = dict(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
)  # fmt: skip


class Pretrained(HuggingFace):
    """Loads its model as users do, in `configure_model` or in ``__init__``."""

    def __init__(self, load: Callable[[], nn.Module], at_once: bool) -> None:
        super().__init__(lambda transformers: nn.Identity())
        self.load = load
        self.is_loaded = at_once
        if at_once:
            self.model = load()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The models' own losses compute in float32."""
        logits = self(**batch).logits
        return nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())

    def configure_model(self) -> None:
        if not self.is_loaded:
            self.model, self.is_loaded = self.load(), True


class Seeing(Callback):
    """What training starts from, and its losses."""

    def __init__(self) -> None:
        self.initial: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for x in (*pl_module.parameters(), *pl_module.buffers()):
            own = leaf(x)
            assert not is_deferred(own)
            if trainer.num_devices > 1 and not is_elsewhere(x):
                assert own.untyped_storage().resizable(), "it lies in the file still"
        strategy: Any = trainer.strategy
        self.initial = {name: x.clone() for name, x in strategy.lightning_module_state_dict().items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def save(case: str, folder: Path, kind: str, dtype: torch.dtype) -> type:
    """Write a pretrained model into ``folder``; returns its class."""
    torch.manual_seed(5)
    model = MODELS[case].module().model.to(dtype)
    if kind == "bin":
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if kind == "many" else "1GB")
    assert len([*folder.glob("*.safetensors")]) == {"one": 1, "bin": 0}.get(kind, len([*folder.glob("*-of-*")]))
    return type(model)


def fit(module: LightningModule, case: str, layout: dict[str, Any] | None, seeing: Any = None, **options: Any) -> Any:
    """The weights that training started from, how many were deferred before, losses, and what was warned of."""
    op_recorder.SMALL = 0
    seeing, deferred = seeing or Seeing(), 0
    configure = module.configure_model

    def configure_and_count() -> None:
        nonlocal deferred
        configure()
        deferred = sum(map(is_deferred, module.parameters()))

    module.configure_model = configure_and_count  # type: ignore[method-assign]
    where: dict[str, Any] = dict(devices=1)
    if layout is not None:
        count = math.prod(size for name, size in layout.items() if name.endswith("_parallel_size"))
        where = dict(devices=count, strategy=lightning_par.HybridParallelStrategy(**layout))
    batch_size = MODELS[case].batch_size
    if layout is not None and layout.get("data_parallel_size") == 2:
        batch_size //= 2
    loader = DataLoader(MODELS[case].data(0), batch_size=batch_size)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [seeing, *options.pop("callbacks", [])]
        trainer = Trainer(callbacks=callbacks, **{"limit_train_batches": 3, **QUIET, **where, **options})
        trainer.fit(module, loader)
    told = [str(warning.message) for warning in caught if "built whole" in str(warning.message)]
    return seeing.initial, deferred, seeing.losses, told


def start(case: str, kind: str, folder: Path, layout: dict[str, Any] | None, dtype: str, at_once: bool) -> Any:
    """Load it, and train three steps."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    torch.manual_seed(11)

    def load() -> nn.Module:
        return getattr(transformers, name).from_pretrained(folder, dtype=getattr(torch, dtype), **OPTIONS.get(case, {}))

    return fit(Pretrained(load, at_once), case, layout, precision="64-true" if dtype == "float64" else "32-true")


def check(pool: Pool, case: str, layout: str, folder: Path, kind: str, stored: str, dtype: str, at_once: bool) -> None:
    model = save(case, folder, kind, getattr(torch, stored))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [model.__name__]}))
    ranks = 4 if layout == "tp2-pp2" else 2
    (expected, _, losses, _), *_ = pool.run(1, start, case, kind, folder, None, dtype, at_once)
    found = pool.run(ranks, start, case, kind, folder, LAYOUTS[layout], dtype, at_once)
    assert found[0][0].keys() == expected.keys()
    for name, x in expected.items():  # the first rank's are whole
        assert x.dtype == found[0][0][name].dtype and torch.equal(x, found[0][0][name]), name
    for _, deferred, theirs, told in found:
        assert not told
        assert at_once or layout == "sp2" or deferred >= len([n for n in expected if not n.endswith("_ids")]) // 2
        if layout != "fsdp2":
            bound = 1e-9 if dtype == "float64" and case in EXACT else 2e-6
            assert all(abs(a - b) <= bound * abs(b) for a, b in zip(theirs, losses, strict=True)), (theirs, losses)


EXACT = ("hf_gpt2", "hf_bert", "hf_vit", "hf_whisper")  # the norms of others compute in float32


@slow(but=["hf_llama-tp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_pretrained_model_starts_and_trains_as_on_one_device(
    pool: Pool, case: str, layout: str, tmp_path: Path
) -> None:
    check(pool, case, layout, tmp_path, "one", "float64", "float64", at_once=False)


@slow(but=["many-configure_model"])
@pytest.mark.parametrize("where", ["configure_model", "init"])
@pytest.mark.parametrize("kind", ["many", "bin"])
def test_files_of_either_kind_in_either_place(pool: Pool, kind: str, where: str, tmp_path: Path) -> None:
    check(pool, "hf_llama", "tp2", tmp_path, kind, "float64", "float64", at_once=where == "init")


@slow(but=["float32-float64-llama"])
@pytest.mark.parametrize("case", ["llama", "mixtral"])
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float64"), ("bfloat16", "float32")])
def test_weights_that_are_converted_as_they_are_read(
    pool: Pool, case: str, stored: str, dtype: str, tmp_path: Path
) -> None:
    check(pool, f"hf_{case}", "tp2", tmp_path, "one", stored, dtype, at_once=False)


# ------------------------------------------------------------------------------------------------- what users do else


def _resized(folder: Path) -> nn.Module:
    """New rows are drawn after the mean and the covariance of those there are."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(56)
    return model


def _with_a_head(folder: Path) -> nn.Module:
    """The head is missing in the files, which hold another."""
    import transformers

    return transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)


def _copied(folder: Path) -> nn.Module:
    """`load_state_dict` copies."""
    import transformers
    from safetensors.torch import load_file

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def _scaled(folder: Path) -> nn.Module:
    """What was read is written to before it is split."""
    model = _copied(folder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "down_proj" in name:
                p.mul_(0.5)
            if "o_proj" in name:
                p[:4].zero_()
    return model


def _assigned(folder: Path) -> nn.Module:
    """Of a model that was made without values, as users do to save memory; its weights are tied again."""
    import transformers
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def _mapped(folder: Path) -> nn.Module:
    """A file of torch's own, whose values are in double."""
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True))
    return model


LOADS: dict[str, Callable[[Path], nn.Module]] = {
    "resized": _resized,
    "with_a_head": _with_a_head,
    "copied": _copied,
    "scaled": _scaled,
    "assigned": _assigned,
    "mapped": _mapped,
}


def _first_weights(name: str, folder: Path, layout: dict[str, Any] | None) -> Any:
    torch.manual_seed(11)
    module = Pretrained(lambda: LOADS[name](folder), at_once=False)
    return fit(module, "hf_llama", layout, limit_train_batches=0)[:2]


@slow(but=["tp2-resized", "tp2-with_a_head", "tp2-mapped"])
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2"])
def test_what_else_users_do_to_load(pool: Pool, layout: str, name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save("hf_llama", tmp_path, "one", torch.float32)
    in_double = {key: x.double() for key, x in load_file(tmp_path / "model.safetensors").items()}
    torch.save(in_double, tmp_path / "weights.pt")
    (expected, _), *_ = pool.run(1, _first_weights, name, tmp_path, None)
    (found, deferred), *_ = pool.run(2, _first_weights, name, tmp_path, LAYOUTS[layout])
    assert deferred == len(expected) and found.keys() == expected.keys()
    for key, x in expected.items():
        assert torch.equal(x, found[key]), key


def _own_file(folder: Path) -> Any:
    """Each rank reads a file of its own, as each host may."""
    rank = os.environ.get("RANK", "0")
    return _first_weights("copied", folder / f"host{rank}", LAYOUTS["tp2"])[0]


def test_where_files_differ_the_first_rank_s_count(pool: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("hf_llama", tmp_path / "host0", "one", torch.float32)
    shutil.copytree(tmp_path / "host0", tmp_path / "host1")
    weights = load_file(tmp_path / "host0" / "model.safetensors")
    save_file({name: x + 1 for name, x in weights.items()}, tmp_path / "host1" / "model.safetensors")
    found = pool.run(2, _own_file, tmp_path)[0]
    for name, x in weights.items():
        assert torch.equal(found[f"model.{name}"], x), name


# --------------------------------------------------------------------------------------------------- what it costs


def _read(folder: Path) -> tuple[int, int]:
    """Bytes that this rank read by itself to load, and those of its own part."""
    counted: list[int] = []

    class Counting(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            File.read_bytes = counting  # type: ignore[method-assign]

        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            File.read_bytes = plain  # type: ignore[method-assign]
            self.own = sum(leaf(x).nbytes for x in pl_module.parameters() if not is_elsewhere(x))

    plain, callback = File.read_bytes, Counting()

    def counting(self: File, target: Tensor, start: int) -> None:
        counted.append(target.numel())
        plain(self, target, start)

    module = Pretrained(lambda: LOADS["copied"](folder), at_once=False)
    fit(module, "hf_llama", LAYOUTS["tp2"], limit_train_batches=0, callbacks=[callback])
    return sum(counted), callback.own


def test_each_rank_reads_its_own_part_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    import transformers

    sizes = dict(hidden_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=48)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = 12  # of each, safetensors looks at one byte
    for read, own in pool.run(2, _read, tmp_path):
        assert read == own + tensors
