"""What the user compiled trains as on one device and stays compiled: one graph serves all blocks, in all steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

C, BLOCKS, STEPS = 8, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Net(LightningModule):
    """Blocks of which ``compile`` makes what is called one after the other."""

    def __init__(self, compile: Callable[[list[Block]], nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(16, C), compile([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(C, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks if isinstance(self.blocks, nn.ModuleList) else [self.blocks]:
            x = block(x)
        return self.head(x)

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), ids.flatten())

    def training_step(self, ids: Tensor) -> Tensor:
        return self.loss(ids)

    def validation_step(self, ids: Tensor) -> None:
        self.log("val", self.loss(ids), sync_dist=True)

    def test_step(self, ids: Tensor) -> None:
        self.log("test", self.loss(ids), sync_dist=True)

    def predict_step(self, ids: Tensor) -> Tensor:
        return self(ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")  # torch's own front ends and no code generator, which is slow


def _in_place(blocks: list[Block]) -> nn.Module:
    for block in blocks:
        block.compile(backend="aot_eager")
    return nn.ModuleList(blocks)


def _inner(blocks: list[Block]) -> nn.Module:
    for block in blocks:
        block.mlp = _compiled(block.mlp)
    return nn.ModuleList(blocks)


def _shared(blocks: list[Block]) -> nn.Module:
    first = _compiled(blocks[0])
    return nn.ModuleList([first, blocks[1], first, first])


def _in_place_around(blocks: list[Block]) -> nn.Module:
    around = nn.Sequential(*blocks)
    around.compile(backend="aot_eager")
    return around


WAYS: dict[str, Callable[[list[Block]], nn.Module]] = {
    "in place": _in_place,
    "wrappers": lambda blocks: nn.ModuleList(map(_compiled, blocks)),
    "wrappers within blocks": _inner,
    "one wrapper, thrice": _shared,
    "wrapper around blocks": lambda blocks: _compiled(nn.Sequential(*blocks)),
    "in place around blocks": _in_place_around,
}
STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: HybridParallelStrategy(data_parallel="fsdp"),
    "fsdp, kept": lambda: HybridParallelStrategy(data_parallel="fsdp", reshard_after_forward=False),
    "pipeline": lambda: PipelineParallelStrategy(microbatches=2),
    "placement": lambda: LayerPlacementStrategy(
        {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 0, "blocks.3": 1, "head": 0}
    ),
    "balanced": lambda: LayerPlacementStrategy("balanced"),
    "ddp": HybridParallelStrategy,
    "tensor": TensorParallelStrategy,
    "sequence": SequenceParallelStrategy,
}
ROWS = [
    *(("in place", name) for name in ("fsdp", "fsdp, kept", "pipeline", "placement")),
    *(("wrappers", name) for name in ("fsdp", "pipeline", "placement")),
    ("wrappers within blocks", "pipeline"),
    ("one wrapper, thrice", "pipeline"),
    *(("wrapper around blocks", name) for name in ("pipeline", "balanced")),
    ("in place around blocks", "pipeline"),
]


class _Lines(logging.Handler):
    """What is said to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _trained(name: str | None, way: str, whole: bool = False) -> dict[str, Any]:
    """What the run of a module gave, and how many graphs were captured and how many breaks there were.

    Args:
        name: the strategy; None for one device.
        way: what is compiled in it.
        whole: whether the module itself is compiled, too, and all entry points are run.
    """
    from torch._dynamo.utils import counters

    counters.clear()
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    said = _Lines()
    loggers = [rank_zero.log, logging.getLogger("lightning_par")]
    for logger in loggers:
        logger.addHandler(said)
    try:
        module = Net(WAYS.get(way, nn.ModuleList))
        ids = torch.arange(STEPS * 8 * 6).remainder(13).view(STEPS, 8, 6)
        if name is not None and name.startswith(("fsdp", "ddp")):  # each replica has half of the samples
            ids = ids.chunk(2, 1)[int(os.environ["RANK"])]
        trainer = Trainer(
            strategy="auto" if name is None else STRATEGIES[name](), accelerator="cpu", max_epochs=1, logger=False,
            devices=1 if name is None else 2, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        )  # fmt: skip
        loader: Any = DataLoader([*ids], batch_size=None)  # type: ignore[arg-type]
        gave: dict[str, Any] = {}
        if whole:
            compiled = _compiled(module)
            trainer.fit(compiled, loader, loader)
            gave |= trainer.callback_metrics
            gave |= trainer.validate(compiled, loader)[0]
            gave |= trainer.test(compiled, loader)[0]
            gave["predicted"] = torch.stack(trainer.predict(compiled, loader))  # type: ignore[arg-type]
            assert trainer.lightning_module is module
        else:
            trainer.fit(module, loader)
        gave |= {key: x.clone() for key, x in module.state_dict().items()}
        breaks = sum(counters["graph_break"].values())
        return {"gave": gave, "graphs": counters["stats"]["unique_graphs"], "breaks": breaks, "said": said.lines}
    finally:
        for logger in loggers:
            logger.removeHandler(said)
        torch.set_default_dtype(torch.float32)
        torch.compiler.reset()


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Callable[..., Any]:
    """What one device gives."""
    return cache(lambda *asked: pool.run(1, _trained, None, *asked)[0])


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert (torch.as_tensor(x) - expected[key]).abs().max() <= 1e-9, key


@long()
@slow(but=["in place-fsdp"])
@pytest.mark.parametrize(("way", "name"), ROWS)
def test_blocks_stay_compiled(way: str, name: str, expected: Callable[..., Any], pool: Pool) -> None:
    one = expected(way)
    assert (one["graphs"], one["breaks"]) == (1, 0)
    for number, rank in enumerate(pool.run(2, _trained, name, way)):
        assert (rank["graphs"], rank["breaks"]) == (1, 0)
        told = [line for line in rank["said"] if "run as written around the layers: blocks." in line]
        assert len(told) == (number == 0 and way.endswith("around blocks"))
        _compare(rank["gave"], one["gave"])


LAYERS = "is compiled layer by layer, and its steps run as written"
WHOLE = ("fsdp", "ddp", "pipeline", "balanced", "tensor", "sequence")


@slow()
@pytest.mark.parametrize("name", WHOLE)
def test_the_layers_of_a_compiled_module_are_compiled(name: str, expected: Callable[..., Any], pool: Pool) -> None:
    one = expected("", True)
    for number, rank in enumerate(pool.run(2, _trained, name, "", True)):
        wanted = one["gave"]
        if rank["gave"]["predicted"].shape != wanted["predicted"].shape:  # each replica predicts for its own samples
            wanted = {**wanted, "predicted": wanted["predicted"].chunk(2, 1)[number]}
        _compare(rank["gave"], wanted)
        assert rank["breaks"] == 0 and rank["graphs"] > 0
        told = [line for line in rank["said"] if LAYERS in line]
        assert len(told) == (4 if number == 0 else 0)  # of each run


def _saved(name: str | None, file: str) -> list[str]:
    """Trains wrappers on from ``file`` where it is there, and saves them there; returns the names of their weights."""
    resumed = Path(file).exists()
    module = Net(WAYS["wrappers"])
    trainer = Trainer(
        strategy="auto" if name is None else STRATEGIES[name](), accelerator="cpu", max_epochs=1 + resumed,
        devices=1 if name is None else 2, enable_checkpointing=False, enable_progress_bar=False, logger=False,
        enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    loader: Any = DataLoader([torch.arange(8 * 6).remainder(13).view(8, 6)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=file if resumed else None)
    assert trainer.global_step == 1 + resumed
    trainer.save_checkpoint(file)
    return list(module.state_dict())


@long()
def test_a_checkpoint_of_wrappers_goes_from_layout_to_layout(tmp_path: Path, pool: Pool) -> None:
    one, moved = (str(tmp_path / name) for name in ("one.ckpt", "moved.ckpt"))
    for file, names in ((one, (None, None)), (moved, ("pipeline", None))):
        keys = [pool.run(1 if name is None else 2, _saved, name, file)[0] for name in names]
    weights, found = (torch.load(file, weights_only=False)["state_dict"] for file in (one, moved))
    assert [*found] == [*weights] == keys[0] == keys[1] and "blocks.0._orig_mod.norm.weight" in found
    _compare(found, weights)
