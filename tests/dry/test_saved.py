"""What a dry run says that a checkpoint takes of a rank, against the directories, files and ledgers of real runs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, dry_run
from lightning_par.checkpoint.file_cost import FileCost
from lightning_par.mesh.ledger import ledger
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.counted import batch_of

DATA, TENSOR = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}
FSDP, PIPELINE = {**DATA, "data_parallel": "fsdp"}, {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": DATA,
    "tensor": TENSOR,
    "fsdp": FSDP,
    "pipeline": PIPELINE,
    "interleaved": {**PIPELINE, "schedule": "interleaved_1f1b"},
    "data x pipeline": {**DATA, **PIPELINE},
    "fsdp x pipeline": {**FSDP, **PIPELINE},
    "pipeline x tensor": {**PIPELINE, **TENSOR},
    "pipeline x sequence": {**PIPELINE, "sequence_parallel_size": 2},
    "fsdp x pipeline x tensor": {**FSDP, **PIPELINE, **TENSOR},
}


class Layers(L.LightningModule):
    """Buffers, large and small, weights without a gradient, and an optimizer that keeps other things of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        self.first = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.last = nn.Linear(32, 4)
        self.never = nn.Linear(4, 40)
        self.first[0].weight.requires_grad_(False)
        self.second[0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(40))
        self.register_buffer("passing", torch.ones(40), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return self.last(self.second(self.first(batch))).mul(self.scale[:4]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad])


class Configured(Layers):
    """Made where it is needed, with groups of weights that are stepped in other ways."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "last"):
            self.build()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.last.parameters(), *self.never.parameters()], "momentum": 0.9},
            {"params": [*self.second.parameters()]},
            {"params": [self.first[0].bias], "momentum": 0.9},
        ]
        return torch.optim.SGD(groups, lr=0.1)


class Told(nn.Linear):
    """Keeps more than weights."""

    def get_extra_state(self) -> Tensor:
        return torch.ones(30)

    def set_extra_state(self, state: Tensor) -> None: ...


class Odd(L.LightningModule):
    """Weights that are made of others, that hang on the module itself, that are shared by both ends; a hook's entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Told(8, 24), nn.Dropout(0.5))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(24, 24))
        self.third = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24, bias=False))
        self.last = nn.Linear(24, 24)
        self.shift = nn.Parameter(torch.zeros(20))
        self.third[2].weight = self.last.weight
        self.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(told=torch.ones(50)))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        x = self.last(self.third(self.second(self.first(batch))))
        return (x[:, :20] + self.shift).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), amsgrad=True)


OWN: dict[str, Callable[[], L.LightningModule]] = {"layers": Layers, "configured": Configured, "odd": Odd}
PLACED = {"first": 1, "second": 0, "last": 1, "never": 0}
LAYOUTS["placement"] = {"placement": PLACED}
LAYOUTS["data x placement"] = {"placement": PLACED, **DATA}


class _Saves(Callback):
    """While the run goes on: after it each rank holds all."""

    def __init__(self, path: str) -> None:
        self.path, self.cost = path, FileCost()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.path}/directory.ckpt")
            trainer.strategy.save_distributed_checkpoint = False  # type: ignore[attr-defined]
            with ledger() as moved:
                trainer.save_checkpoint(f"{self.path}/file.ckpt")
            sent = [x.nbytes for x in moved.select("send", purpose="state")]
            received = [x.nbytes for x in moved.select("recv", purpose="state")]
            self.cost = FileCost(sum(sent), len(sent), sum(received))


def _save(case: str, layout: dict[str, Any], devices: int, path: str) -> FileCost:
    saves = _Saves(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=devices, max_steps=2, callbacks=[saves],
            strategy=HybridParallelStrategy(**layout, save_distributed_checkpoint=True),
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = OWN[case]() if case in OWN else MODELS[case].module()
        data: Any = torch.ones(64, 8) if case in OWN else MODELS[case].data(0)
        trainer.fit(module, DataLoader(data, batch_size=8 if case in OWN else MODELS[case].batch_size))
    return saves.cost


def _written(path: Path) -> list[tuple[int, int]]:
    """By each rank: bytes of tensors, and how many pieces; a tied weight is there once, by all of its names."""
    metadata = FileSystemReader(path).read_metadata()
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for index, stored in metadata.storage_data.items():
        tensor: Any = metadata.state_dict_metadata.get(index.fqn)
        if not hasattr(tensor, "chunks"):
            continue
        (chunk,) = (x for x in tensor.chunks if x.offsets == index.offset)
        size = chunk.sizes.numel() * tensor.properties.dtype.itemsize
        found[int(stored.relative_path[2])][stored.offset] = size
    return [(sum(sizes.values()), len(sizes)) for _, sizes in sorted(found.items())]


def _in_file(path: Path) -> int:
    """Bytes of the weights and states in it, those that share memory once."""
    loaded = torch.load(path, weights_only=True)
    found: dict[int, int] = {}
    states = [x for one in loaded["optimizer_states"] for state in one["state"].values() for x in state.values()]
    for x in [*loaded["state_dict"].values(), *states]:
        if isinstance(x, Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(found.values())


@long()
@slow(but=["odd-fsdp x pipeline"])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gpt", "tensor"),
        ("unet", "data"),
        ("gpt_tied", "fsdp"),
        ("gpt_tied", "tensor"),
        ("gpt", "pipeline"),
        ("gpt_tied", "pipeline"),
        ("lstm", "pipeline"),
        ("gpt", "data x pipeline"),
        ("gpt_tied", "pipeline x tensor"),
        ("gpt_tied", "fsdp x pipeline"),
        ("mlp_deep", "interleaved"),
        ("hf_llama", "pipeline x sequence"),
        ("gpt", "fsdp x pipeline x tensor"),
        ("layers", "data"),
        ("layers", "pipeline"),
        ("layers", "data x pipeline"),
        ("layers", "fsdp x pipeline"),
        ("layers", "placement"),
        ("layers", "data x placement"),
        ("configured", "pipeline"),
        ("configured", "fsdp x pipeline"),
        ("odd", "tensor"),
        ("odd", "pipeline"),
        ("odd", "data x pipeline"),
        ("odd", "fsdp x pipeline"),
    ],
)
def test_each_rank_writes_and_sends_what_was_said(case: str, name: str, pool: Pool, tmp_path: Path) -> None:
    """A layout's name has as many factors as it has twos of devices."""
    layout = LAYOUTS[name] | ({"microbatches": 1} if case in OWN else {})  # BatchNorm needs the whole batch
    devices = 2 ** max(1, name.count(" x ") + 1)
    costs = pool.run(devices, _save, case, layout, devices, str(tmp_path))
    module, batch = (OWN[case], torch.ones(8, 8)) if case in OWN else (MODELS[case].module, batch_of(case))
    told = [dry_run(module, batch, layout, devices=devices, rank=rank) for rank in range(devices)]
    assert [x.saved for x in told] == _written(tmp_path / "directory.ckpt")
    files = [x.file for x in told]
    assert [(x.sent, x.messages, x.received) for x in files if x] == [(x.sent, x.messages, x.received) for x in costs]
    in_file = _in_file(tmp_path / "file.ckpt")
    assert [x.written for x in files if x] == [in_file] + [0] * (devices - 1)
