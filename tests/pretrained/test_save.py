"""What user code saves between steps, on all ranks or on one alone: the bytes that one device writes."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint.files import make_checkpoint_io
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

VOCABULARY, LENGTH, SIZE = 48, 8, "20KB"  # of a file, of which there are several


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def _model(name: str) -> Any:
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if name == "mixtral":  # its experts are stacked, and saved one by one
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2, num_experts_per_tok=1))
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **off))


def _save_pretrained(module: Saver, folder: Path) -> None:
    module.model.save_pretrained(folder, max_shard_size=SIZE)


def _save_state_dict(module: Saver, folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    torch.save(module.model.state_dict(), folder / "weights.pt")


def _save_parameters(module: Saver, folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    torch.save(dict(module.model.named_parameters()), folder / "parameters.pt")


def _save_file(module: Saver, folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    state = {name: x for name, x in module.model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(state, folder / "weights.safetensors")


WAYS: dict[str, Callable[[Any, Path], None]] = {
    "save_pretrained": _save_pretrained,
    "state_dict": _save_state_dict,
    "parameters": _save_parameters,
    "save_file": _save_file,
}


class Saver(L.LightningModule):
    """Saves in every way in a hook, next to a checkpoint of the same moment."""

    def __init__(self, name: str, folder: Path | None, who: str = "all", hook: str = "batch") -> None:
        super().__init__()
        self.model = _model(name)
        self.folder, self.who, self.hook = folder, who, hook
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "batch" and batch_idx == 1:
            self.save()

    def on_train_end(self) -> None:
        if self.hook == "end":
            self.save()

    def save(self) -> None:
        if self.folder is None:
            return
        self.trainer.save_checkpoint(self.folder / "one.ckpt", weights_only=True)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self.who == "all" or rank == (0 if self.who == "first" else ranks - 1):
            for way, save in WAYS.items():
                save(self, self.folder / f"{way}-{rank}")


def _fit(name: str, layout: dict[str, Any] | None, folder: str | None, who: str, hook: str) -> list[float]:
    torch.set_default_dtype(_dtype(name))
    L.seed_everything(1, verbose=False)
    if name == "mixtral" and layout is not None:  # experts look for their tokens in all samples
        layout = {key: size for key, size in layout.items() if key != "microbatches"}
    module = Saver(name, None if folder is None else Path(folder), who, hook)
    batches = torch.randint(VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="auto" if layout is None else HybridParallelStrategy(**layout),
        devices=1 if layout is None else torch.distributed.get_world_size() if _is_on() else "auto",
        max_epochs=1,
        use_distributed_sampler=False,
        **options,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=4))
    return module.losses


def _dtype(name: str) -> torch.dtype:
    """Experts' grouped products know no float64."""
    return torch.float32 if name == "mixtral" else torch.float64


def _is_on() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _on_ranks(name: str, layout: dict[str, Any], folder: str, who: str, hook: str) -> list[float]:
    torch.distributed.init_process_group("gloo")
    return _fit(name, layout, folder, who, hook)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "residual": dict(tensor_parallel_size=2, shard_residual=True),
    "pipeline": dict(pipeline_parallel_size=2, microbatches=2),
    "zbv": dict(pipeline_parallel_size=2, schedule="zbv", microbatches=2),
    "sequence": dict(sequence_parallel_size=2),
    "fsdp": dict(data_parallel="fsdp", data_parallel_size=2),
    "fsdp-tensor": dict(data_parallel="fsdp", data_parallel_size=2, tensor_parallel_size=2),
    "pipeline-tensor": dict(pipeline_parallel_size=2, tensor_parallel_size=2),
    "fsdp-pipeline": dict(data_parallel="fsdp", data_parallel_size=2, pipeline_parallel_size=2),
}
ROWS = [
    (name, layout, who, hook)
    for name in ("llama", "gpt2", "mixtral")
    for layout in LAYOUTS
    for who, hook in (("first", "batch"), ("all", "batch"), ("last", "end"))
]
_QUICK = ["llama-tensor-first-batch", "llama-pipeline-first-batch"]


@long("llama-pipeline-first-batch")
@slow(but=_QUICK)
@pytest.mark.parametrize(("name", "layout", "who", "hook"), ROWS, ids=["-".join(row) for row in ROWS])
def test_what_is_saved_between_steps_has_one_devices_bytes(
    pool: Pool, tmp_path: Path, name: str, layout: str, who: str, hook: str
) -> None:
    sizes = LAYOUTS[layout]
    ranks = 4 if "-" in layout else 2
    told = pool.run(ranks, _on_ranks, name, sizes, str(tmp_path), who, hook)
    if "fsdp" not in layout:  # whose replicas have other batches
        alone = _fit(name, None, None, who, hook)
        assert told[0] == pytest.approx(alone, rel=1e-5)
    weights = make_checkpoint_io().load_checkpoint(tmp_path / "one.ckpt")["state_dict"]
    model = nn.Module()
    model.model = _model(name).to(_dtype(name))
    model.load_state_dict(weights)
    for rank in {"all": range(ranks), "first": [0], "last": [ranks - 1]}[who]:
        for way, save in WAYS.items():
            if rank and way == "save_pretrained":  # transformers writes on the first rank alone
                assert not [*(tmp_path / f"{way}-{rank}").iterdir()]
                continue
            save(model, tmp_path / way)
            _compare(tmp_path / way, tmp_path / f"{way}-{rank}")


def _compare(one: Path, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in one.iterdir())
    for path in sorted(one.iterdir()):
        other = folder / path.name
        if path.name == "config.json":  # a new model says another dtype than one that was cast
            assert json.loads(path.read_text()).keys() == json.loads(other.read_text()).keys()
        elif path.suffix == ".pt":
            _compare_states(torch.load(path, weights_only=True), torch.load(other, weights_only=True))
        else:
            assert path.read_bytes() == other.read_bytes(), path.name


def _compare_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    memory: dict[int, str] = {}
    for name, x in one.items():
        y = other[name]
        assert torch.equal(x, y) and type(x) is type(y) and x.requires_grad == y.requires_grad, name
        first = memory.setdefault(x.data_ptr(), name)
        assert y.data_ptr() == other[first].data_ptr(), f"{name} shares memory with {first} on one device"


class _Averages(Saver):
    """Saves moved weights on the first rank, while the others put theirs back."""

    def __init__(self, folder: Path, waits: bool) -> None:
        super().__init__("llama", folder)
        self.waits = waits

    def save(self) -> None:
        assert self.folder is not None
        before = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(2)
            self.trainer.save_checkpoint(self.folder / "one.ckpt", weights_only=True)
            if self.trainer.is_global_zero:
                _save_state_dict(self, self.folder / "rank")
            if self.waits:
                self.trainer.strategy.barrier()
            for p, old in zip(self.parameters(), before):
                p.copy_(old)


def _average(layout: dict[str, Any], folder: str, waits: bool) -> None:
    torch.distributed.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HybridParallelStrategy(**layout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    batches = torch.randint(48, (16, 8))  # two a replica, at least
    trainer.fit(_Averages(Path(folder), waits), torch.utils.data.DataLoader(batches, batch_size=4))


@slow("pipeline", "fsdp")
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "fsdp"])
def test_weights_that_are_moved_between_steps_are_saved_moved_or_not_at_all(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    sizes = {name: size for name, size in LAYOUTS[layout].items() if name != "microbatches"}
    pool.run(2, _average, sizes, str(tmp_path), True)
    saved = torch.load(tmp_path / "rank" / "weights.pt", weights_only=True)
    weights = make_checkpoint_io().load_checkpoint(tmp_path / "one.ckpt")["state_dict"]
    assert all(torch.equal(x, weights[f"model.{name}"]) for name, x in saved.items())
    with pytest.raises(RanksFailedError, match="has written to weights.*barrier"):
        pool.run(2, _average, sizes, str(tmp_path), False)


class _Keeps(Saver):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.kept = self.model.state_dict()
        else:
            torch.save(self.kept, "/dev/null")


class _WritesAlone(Saver):
    """What one rank alone does to its parts is no weight of the model's."""

    def save(self) -> None:
        if torch.distributed.get_rank() == 0:
            with torch.no_grad():
                for p in self.parameters():
                    p.mul_(2)
            torch.save(self.model.state_dict(), "/dev/null")


def _write_alone(layout: dict[str, Any], folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**layout), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(
        _WritesAlone("llama", Path(folder)), torch.utils.data.DataLoader(torch.randint(48, (8, 8)), batch_size=2)
    )


@slow("fsdp")
@pytest.mark.parametrize("layout", ["tensor", "fsdp"])
def test_weights_that_one_rank_alone_has_written_to_are_not_saved(pool: Pool, tmp_path: Path, layout: str) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="written to weights which this one has not, in code that it ran alone"):
        pool.run(2, _write_alone, LAYOUTS[layout], str(tmp_path), grace=5)
    assert time.monotonic() - began < 60


def _keep() -> None:
    torch.distributed.init_process_group("gloo")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="pipeline_parallel", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    L.seed_everything(1, verbose=False)
    trainer.fit(_Keeps("llama", None), torch.utils.data.DataLoader(torch.randint(48, (12, 8)), batch_size=4))


@slow()
def test_a_state_dict_that_is_kept_stays_that_of_the_weights(pool: Pool) -> None:
    pool.run(2, _keep)  # as on one device, where it has their memory
