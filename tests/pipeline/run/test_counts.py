"""What a pipeline's step sends, waits and holds, counted: the known minimum of each schedule, no more.

b samples a microbatch of s tokens, h features, V words, m microbatches, p ranks; a boundary between stages is b * s * h
elements there and as many back.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import PipelineParallelStrategy, ScheduleTrace, ledger
from lightning_par.pipeline.simulate import bubble, replay
from lightning_par.private.process_groups import default_store
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.tensor.test_counts import Counted
from tests.tensor.test_counts import V as V_EXAMPLE
from tests.tensor.test_counts import s as LENGTH

WORDS, FEATURES, TOKENS, HIDDEN, BLOCKS = 24, 8, 5, 44, 8  # HIDDEN * FEATURES is the size of no other tensor
RANKS, MICROBATCHES = 4, 8
BOUNDARY = TOKENS * FEATURES  # one sample a microbatch


class Saved:
    """A tensor that a graph keeps for its backward."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


alive: weakref.WeakSet[Saved] = weakref.WeakSet()


def peak(now: int) -> int:
    """The most so far; it is in the store where ranks meet: what a step changes elsewhere in Python counts once."""
    store, key = default_store(), f"most saved on rank {dist.get_rank()}"
    so_far = store.add(key, 0)
    return store.add(key, max(0, now - so_far))


def pack(x: Tensor) -> Saved:
    saved = Saved(x)
    if type(x) is Tensor:  # not in the trial run
        alive.add(saved)
        peak(len(alive))
    return saved


def unpack(saved: Saved) -> Tensor:
    return saved.x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            h = F.gelu(h)  # keeps its input
        return x + self.down(h)


class Net(L.LightningModule):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, FEATURES)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Books(L.Callback):
    """Opens the ledger for the second step, and counts at its end."""

    trace: list[tuple[Any, ...]]
    earlier: set[int] = set()  # what other runs of the process have left

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.context = ledger()
        self.moved = self.context.__enter__()
        gc.collect()
        peak(0)
        default_store().delete_key(f"most saved on rank {dist.get_rank()}")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.context.__exit__(None, None, None)
        self.in_flight = peak(0) / (BLOCKS / RANKS)
        (optimizer,) = trainer.optimizers
        here = [p for p in pl_module.parameters() if _storage(p)]
        self.held = sum({_storage(p): p.untyped_storage().nbytes() for p in here}.values())
        self.states = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim)
        self.of_blocks = len(_tensors_in_memory(FEATURES * HIDDEN * 4) - self.earlier)


def _storage(x: Tensor) -> int:
    """Where its memory is, 0 where it has none."""
    plain = type(x) is Tensor or issubclass(type(x), nn.Parameter)  # other kinds have no memory of their own
    return x.untyped_storage().data_ptr() if plain else 0


def _tensors_in_memory(nbytes: int) -> set[int]:
    """Where there are pieces of memory of this size, whoever keeps them."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if _storage(x)]
    return {_storage(x) for x in tensors if x.untyped_storage().nbytes() == nbytes}


def count(module: L.LightningModule, size: int, data: Tensor, clip: float | None = None, **options: Any) -> Books:
    """Two steps; the books are of the second."""
    L.seed_everything(0, verbose=False)
    books, trace = Books(), ScheduleTrace(os.devnull, step=1)
    trainer = L.Trainer(
        strategy=PipelineParallelStrategy(**options), accelerator="cpu", devices=size, max_steps=2, logger=False,
        callbacks=[books, trace], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=clip,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=len(data) // 2))  # type: ignore[arg-type]
    books.trace = [(s.rank, s.action.op, s.action.stage, s.action.microbatch) for s in trace.spans]
    del books.context
    return books


def run(schedule: str, tied: bool = False, clip: float | None = None) -> Books:
    """The blocks in equal parts over all stages."""
    stages = len(PLACEMENTS[schedule])
    cuts = [f"blocks.{i * BLOCKS // stages}" for i in range(1, stages)]
    data = torch.randint(0, WORDS, (2 * MICROBATCHES, TOKENS))
    Books.earlier = _tensors_in_memory(FEATURES * HIDDEN * 4)
    return count(Net(tied), RANKS, data, clip, schedule=schedule, microbatches=MICROBATCHES, stages=cuts)


@pytest.fixture(scope="module")
def books(pool: Pool) -> Any:
    """Every rank's books of a step under a schedule, made once."""
    made: dict[Any, list[Books]] = {}

    def get(*args: Any) -> list[Books]:
        if args not in made:
            made[args] = pool.run(RANKS, run, *args)
        return made[args]

    return get


LOOP, ROUND, V = (0, 1, 2, 3), (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)
PLACEMENTS = {
    "gpipe": LOOP, "1f1b": LOOP, "interleaved_1f1b": ROUND, "interleaved_zero_bubble": ROUND, "zbv": V,
}  # fmt: skip
# Boundary tensors that each rank sends for a microbatch: 2 * v for an inner rank, where v is the stages on a rank.
SENT = {LOOP: [1, 2, 2, 1], ROUND: [3, 4, 4, 3], V: [2, 4, 4, 2]}
p, m = RANKS, MICROBATCHES
BUBBLE = {
    "gpipe": (p - 1) / (m + p - 1),
    "1f1b": (p - 1) / (m + p - 1),
    "interleaved_1f1b": (p - 1) / (2 * m + p - 1),
    # Of 3 * m + (p - 1) / 2, for forward, inputs' and weights' backward that take 1 each on all stages of a rank.
    "interleaved_zero_bubble": (p - 1) / (6 * m + p - 1),
    "zbv": (p - 1) / (6 * m + p - 1),
}
IN_FLIGHT = {
    "gpipe": [m] * p,
    "1f1b": [min(m, p - i) for i in range(p)],
    "interleaved_1f1b": [p + (p - 1) / 2 - i for i in range(p)],
    "interleaved_zero_bubble": [p] * p,
    "zbv": [p] * p,
}


@slow(but=["1f1b"])
@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_messages_and_bytes_between_stages_are_the_least(schedule: str, books: Any) -> None:
    for rank, found in enumerate(books(schedule)):
        sent = [t for t in found.moved.transfers if t.verb == "send"]
        assert len(sent) == SENT[PLACEMENTS[schedule]][rank] * m
        assert {(t.axis, t.numel, t.nbytes) for t in sent} == {("pipeline", BOUNDARY, 4 * BOUNDARY)}
        placement = PLACEMENTS[schedule]
        forward = sum(a == rank != b for a, b in zip(placement, placement[1:])) * m
        assert sum(t.purpose == "activations" for t in sent) == forward
        assert sum(t.purpose == "gradients of activations" for t in sent) == len(sent) - forward


@slow(but=["1f1b"])
@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_nothing_else_is_sent_but_one_message_of_what_the_last_stage_did(schedule: str, books: Any) -> None:
    for found in books(schedule):
        rest = [t for t in found.moved.transfers if t.verb not in ("send", "recv")]
        assert {(t.axis, t.purpose, t.verb) for t in rest} == {("pipeline", "effects", "broadcast")}
        assert sum(t.nbytes for t in rest) < 2000


@long("zbv")
@slow(but=["1f1b", "zbv"])
@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_the_bubble_of_a_recorded_step_is_the_closed_form(schedule: str, books: Any) -> None:
    spans = replay(books(schedule)[0].trace)
    ops = 3 if schedule in ("interleaved_zero_bubble", "zbv") else 2
    assert len(spans) == m * len(PLACEMENTS[schedule]) * ops
    assert bubble(spans, p) == pytest.approx(BUBBLE[schedule], abs=5e-4)


@slow(but=["1f1b", "zbv"])
@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_activations_of_no_more_microbatches_are_held(schedule: str, books: Any) -> None:
    assert [found.in_flight for found in books(schedule)] == IN_FLIGHT[schedule]


@slow(but=["1f1b", "zbv"])
@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_a_rank_holds_its_stages_and_no_more(schedule: str, books: Any) -> None:
    net = Net()
    parts = (net.blocks[0], net.tokens, net.head)
    block, embedding, head = (sum(x.nbytes for x in part.parameters()) for part in parts)
    placement = PLACEMENTS[schedule]
    for rank, found in enumerate(books(schedule)):
        own = block * BLOCKS // RANKS + embedding * (placement[0] == rank) + head * (placement[-1] == rank)
        assert found.held == own
        assert found.states == 2 * own
        # Two matrices a block: each with its gradient and AdamW's two states.
        assert found.of_blocks == 2 * 4 * BLOCKS // RANKS


@long()
@slow("zbv")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_tied_embedding_and_clipping_by_norm_cost_one_all_reduce_each(schedule: str, books: Any) -> None:
    placement = PLACEMENTS[schedule]
    across = placement[0] != placement[-1]
    for rank, found in enumerate(books(schedule, True, 0.1)):
        tied = found.moved.select(purpose="tied")
        # Its gradient, and a flag that says that there is one.
        expected = [("all_reduce", WORDS * FEATURES + 1, 2)] if across and rank in (0, p - 1) else []
        assert [(t.verb, t.numel, t.ranks) for t in tied] == expected
        clip = found.moved.select(purpose="clip")
        assert [(t.axis, t.verb, t.numel, t.ranks) for t in clip] == [("pipeline", "all_reduce", 1, p)]


def example() -> Books:
    """Two ranks, 4 microbatches of 2 samples of 32 tokens, 64 features."""
    return count(Counted("swiglu"), 2, torch.randint(0, V_EXAMPLE, (2 * 8, LENGTH)), microbatches=4)


@long()
def test_the_worked_example(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, example)):
        sent = [t for t in found.moved.transfers if t.verb == "send"]
        assert sum(t.numel for t in sent) == 16_384 and found.moved.sent(purpose=sent[0].purpose) == 65_536
        assert [t.purpose for t in sent] == [("activations", "gradients of activations")[rank]] * 4
