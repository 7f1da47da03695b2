"""Blocks that the user compiled stay compiled where tensors are split: the backend gets this rank's parts alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy, TensorParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.strategies.test_compiled_blocks import BLOCKS, STEPS, Block, C

LENGTH = 6


@dataclass(frozen=True)
class Compiled:
    """What the backend was given, and in which step."""

    step: int
    kinds: list[type]
    sizes: set[int]


CALLS: list[Compiled] = []
step = 0


def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """torch's "aot_eager"."""
    from torch._dynamo import lookup_backend

    CALLS.append(Compiled(step, [type(x) for x in inputs], {n for x in inputs for n in x.shape}))
    return lookup_backend("aot_eager")(graph, inputs)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(16, C), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(C, 16)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        global step
        step = batch_idx
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend=backend)


class Later(Net):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend=backend)


class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in self.blocks)  # type: ignore[misc]


STRATEGIES: dict[str, Any] = {
    "tensor": TensorParallelStrategy,
    **{name: partial(SequenceParallelStrategy, attention=name) for name in ("ring", "ulysses", "all_gather")},
}


@dataclass(frozen=True)
class Outcome:
    """What training on one rank came to.

    Attributes:
        graphs: that were captured.
        breaks: of them.
        calls: of the backend.
    """

    weights: dict[str, Tensor]
    graphs: int
    breaks: int
    calls: list[Compiled]


def _trained(name: str | None, kind: type[Net]) -> Outcome:
    from torch._dynamo.utils import counters

    counters.clear()
    CALLS.clear()
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    try:
        module = kind()
        ids = torch.arange(STEPS * 8 * LENGTH).remainder(13).view(STEPS, 8, LENGTH)
        trainer = Trainer(
            strategy="auto" if name is None else STRATEGIES[name](),
            accelerator="cpu", max_epochs=1, logger=False, devices=1 if name is None else 2,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader([*ids], batch_size=None))  # type: ignore[arg-type]
        weights = {key.replace("_orig_mod.", ""): x.clone() for key, x in module.state_dict().items()}
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return Outcome(weights, graphs, breaks, [*CALLS])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.compiler.reset()


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Any:
    return pool.run(1, _trained, None, InPlace)[0]


ROWS = [
    *((name, InPlace) for name in STRATEGIES),
    *((name, Wrapped) for name in ("tensor", "ring", "ulysses")),
    ("ring", Later),
]


@long()
@slow("tensor-Wrapped", "ring-*", "ulysses-*", "all_gather-*", "*-Later")
@pytest.mark.parametrize(("name", "kind"), ROWS, ids=[f"{name}-{kind.__name__}" for name, kind in ROWS])
def test_blocks_stay_compiled(name: str, kind: type[Net], expected: Any, pool: Pool) -> None:
    assert (expected.graphs, expected.breaks, len(expected.calls)) == (1, 0, 1)
    for found in pool.run(2, _trained, name, kind):
        assert (found.graphs, found.breaks) == (1, 0)
        assert all(call.step < 2 for call in found.calls)
        assert {kind for call in found.calls for kind in call.kinds} <= {Tensor, nn.Parameter}
        # attention and what it moves is at the edges
        whole = 4 * C if name == "tensor" else LENGTH
        assert found.calls and not any(whole in call.sizes for call in found.calls)
        assert found.weights.keys() == expected.weights.keys()
        for key, x in found.weights.items():
            assert (x - expected.weights[key]).abs().max() <= 1e-9, key
