"""Tokens between islands go in several messages while products of others are computed, where that pays."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, dry_run, ledger
from lightning_par.mesh import chunks, overlapped_entry
from lightning_par.mesh.chunks import SPEEDS, Speeds, chunks_of, how_many
from lightning_par.mesh.positions import Positions
from tests.helpers.accelerator import accelerator, device_type
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.test_counts import BATCH, planned
from tests.tensor.test_counts import LAYERS, Counted, count, h, s
from tests.tensor.test_hidden_messages import STEPS, Net

EVEN, UNEVEN = Positions.even(8192, 8), Positions.even(8190, 8)
H100 = SPEEDS["cuda"]
ALWAYS = Speeds(1e3, 0.0, {2: 4e4, 4: 2e4, 8: 1e4}, 0.0, 1e30)
"""Of a device on which messages and products take long, and all else nothing."""


def test_chunks_go_where_products_hide_them() -> None:
    samples = chunks_of((4, 8192, 4096), 3584, (2, 2), 1, EVEN, 8, "cuda")
    assert samples is not None and samples.by_sample and samples.ends == (0, 1, 2, 3, 4)
    rows = chunks_of((1, 8192, 8192), 2048, (2, 2), 1, EVEN, 8, "cuda")
    assert rows is not None and not rows.by_sample and rows.ends[-1] == 1024
    first = chunks_of((8192, 2, 8192), 2048, (2, 2), 0, EVEN, 8, "cuda")
    assert first is not None and not first.by_sample and first.ends[-1] == 2048


@pytest.mark.parametrize(
    ("shape", "made", "positions", "kind"),
    [
        ((4, 8192, 4096), 3584, EVEN, "cpu"),  # whose processors move messages themselves
        ((4, 8192, 32), 32, EVEN, "cuda"),  # small
        ((4, 8192, 8192), 16, EVEN, "cuda"),  # a product that hides nothing
        ((1, 8190, 8192), 7168, UNEVEN, "cuda"),  # ranks' rows differ in number
        ((4, 8192, 16, 256), 3584, EVEN, "cuda"),
    ],
)
def test_one_message_goes_elsewhere(shape: tuple[int, ...], made: int, positions: Positions, kind: str) -> None:
    assert chunks_of(shape, made, (2, 2), 1, positions, 8, kind) is None


def test_samples_are_cut_whatever_number_of_tokens_ranks_have() -> None:
    found = chunks_of((3, 8190, 8192), 7168, (2, 2), 1, UNEVEN, 8, "cuda")
    assert found is not None and found.ends == (0, 1, 2, 3) and not found.in_order(0)


@pytest.mark.parametrize(("made", "count"), [(100, 1), (2_000, 4), (2_000_000, 1)])
def test_as_many_chunks_as_take_the_least_time(made: int, count: int) -> None:
    """A message that is long, as long, and short beside its product."""
    assert how_many(8192, 8192, made, (2, 2), 8, 64, True, H100) == count


class Reads(nn.Module):
    """An island whose tokens are the first dim, and of whose features one rank has more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 33), nn.Linear(33, h)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return (x + self.down(torch.tanh(self.up(self.norm(x))))).transpose(0, 1)


class Chunked(Net):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        if how == "tokens first":
            self.blocks.append(Reads())
        if how == "adapted":
            for block in self.blocks:
                block.requires_grad_(False)
                block.norm1.requires_grad_(True)
                block.attention.v.requires_grad_(True)
            self.blocks[1].mlp[0].bias.requires_grad_(True)

    def predict_step(self, batch: Tensor) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x


HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one sample": {},
    "uneven": {},
    "uneven, one sample": {},
    "tokens first": {},
    "autocast": dict(precision="bf16-mixed"),
    "checkpointed": {},
    "accumulated": dict(accumulate_grad_batches=2),
    "frozen": {},
    "adapted": {},
    "hooked": {},
    "penalty": {},
    "1f1b": dict(pipeline_parallel_size=2, microbatches=2, schedule="1f1b"),
    "zbv": dict(pipeline_parallel_size=2, microbatches=2, schedule="zbv"),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
}
RANKS = {"1f1b": 4, "zbv": 4, "fsdp": 4}
SHAPES = {"one sample": (1, s), "uneven": (3, s + 1), "uneven, one sample": (1, s + 1), "1f1b": (4, s), "zbv": (4, s)}
WHOLE = ("uneven, one sample", "zbv")
"""How a run goes on as ever."""


@contextmanager
def hiding(chunked: bool) -> Iterator[None]:
    """Messages of any size are hidden, by chunks or not."""
    with patch.dict(chunks.SPEEDS), patch.object(overlapped_entry, "LEAST_BYTES", 0):
        chunks.SPEEDS.pop(device_type(), None)
        if chunked:
            chunks.SPEEDS[device_type()] = ALWAYS
        yield


def train(how: str, chunked: bool) -> tuple[list[dict[str, Tensor]], dict[Any, int], dict[Any, int], list[Tensor]]:
    """Gradients before each step, bytes and messages of the tensor axis by what they are, and predictions."""
    warnings.simplefilter("ignore")
    options = dict(precision="64-true") | HOWS[how]
    ours = ("pipeline_parallel_size", "microbatches", "schedule", "data_parallel_size", "data_parallel")
    sizes = {key: options.pop(key) for key in ours if key in options}
    trainer = Trainer(
        strategy=HybridParallelStrategy(tensor_parallel_size=2, shard_residual=True, **sizes),
        accelerator=accelerator(), devices=RANKS.get(how, 2), max_steps=STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    dtype = torch.float32 if how == "autocast" else torch.float64
    shape = SHAPES.get(how, (2, s))
    batches = [torch.randn(*shape, h, generator=g, dtype=torch.float64).to(dtype) for _ in range(2 * STEPS)]
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    module = Chunked(how)
    with hiding(chunked), ledger() as moved:
        trainer.fit(module, loader)
        predicted = [] if sizes else trainer.predict(module, loader)
    nbytes: dict[Any, int] = defaultdict(int)
    messages: dict[Any, int] = defaultdict(int)
    for t in moved.transfers:
        nbytes[t.axis, t.verb, t.purpose] += t.nbytes
        messages[t.axis, t.verb, t.purpose] += 1
    return module.gradients, dict(nbytes), dict(messages), predicted or []  # type: ignore[return-value]


@long()
@slow(but=["autocast"])
@pytest.mark.parametrize("how", HOWS)
def test_gradients_and_bytes_are_those_of_one_message(pool: Pool, how: str) -> None:
    before, after = (pool.run(RANKS.get(how, 2), train, how, chunked) for chunked in (False, True))
    for (wanted, plain, once, said), (gradients, nbytes, messages, predicted) in zip(before, after, strict=True):
        assert plain == nbytes
        more = {key for key in once if messages[key] > once[key]}
        assert more == (set() if how in WHOLE else {
            ("tensor", "all_gather", "enter"), ("tensor", "all_gather", "leave"), ("tensor", "reduce_scatter", "leave"),
        })  # fmt: skip
        close = dict(rtol=2e-2, atol=1e-3) if how == "autocast" else dict(rtol=0, atol=1e-12)
        for a, b in zip(gradients, wanted, strict=True):
            assert a.keys() == b.keys()
            for name, grad in a.items():
                torch.testing.assert_close(grad, b[name], **close)
        for x, y in zip(predicted, said, strict=True):
            torch.testing.assert_close(x, y, **close)


def _moved() -> Any:
    with hiding(True):
        return count("gelu", None, True)[0]


@slow()
def test_plans_and_dry_runs_know_of_chunks(pool: Pool) -> None:
    layout = {"tensor_parallel_size": 2, "shard_residual": True}
    moved = pool.run(2, _moved)[0]
    with hiding(True):
        dry = dry_run(lambda: Counted("gelu"), BATCH, layout, devices=2, rank=0)
        said = planned(layout, "gelu")["sent"]["tensor"]
    assert said == moved.sent(axis="tensor")
    kinds = [(purpose, verb) for purpose in ("enter", "leave") for verb in ("all_gather", "reduce_scatter")]
    messages = [len(moved.select(verb, "tensor", purpose)) for purpose, verb in kinds]
    assert messages == [dry.messages["tensor", purpose, verb] for purpose, verb in kinds]
    # Those of attention and the head in two chunks; the MLP's products take so long that little would be gained.
    assert messages == [3 * LAYERS + 2, 2 * LAYERS + 1, 3 * LAYERS + 1, 3 * LAYERS + 1]
