"""What a step under a placement sends and holds, counted: what crosses goes once each way, a device has its layers."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import LayerPlacementStrategy, ScheduleTrace, ledger
from lightning_par.absent.elsewhere import is_elsewhere
from tests.helpers.models.convolutional import UNet
from tests.helpers.models.dense import BackAndForth, Branches
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

B = 4  # samples in a batch
FLOAT = 4
THERE, BACK = "activations", "gradients of activations"


class Plain(L.LightningModule):
    """Logs nothing; takes the loss of a module of the tests."""

    def training_step(self, batch: Any) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Seed(Plain, BackAndForth): ...


class Branched(Plain, Branches): ...


class Pictures(Plain, UNet): ...


class Fan(Plain):
    """A value that three layers take, two of them on one other device, and one that its own device takes again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c, self.d = (nn.Linear(12, 12) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        a = self.a(h)
        kept = h * 2
        b = self.b(a)
        return self.d(self.c(h) + b) + kept.mean(1, keepdim=True)


class Books(L.Callback):
    """Opens the ledger for the second step, and counts at its end."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.context = ledger()
        self.moved = self.context.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.context.__exit__(None, None, None)
        here = {name: p for name, p in pl_module.named_parameters() if not is_elsewhere(p)}
        (optimizer,) = trainer.optimizers
        self.held = {name: p.untyped_storage().nbytes() for name, p in here.items()}
        self.states = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim)
        self.storage = sum(x.untyped_storage().nbytes() for x in pl_module.parameters() if not is_elsewhere(x))


def count(kind: str, placement: dict[str, int], microbatches: int = 1) -> Books:
    """Two steps; the books are of the second."""
    torch.manual_seed(0)
    books, trace = Books(), ScheduleTrace(os.devnull, step=1)
    trainer = L.Trainer(
        strategy=LayerPlacementStrategy(placement, microbatches=microbatches), accelerator="cpu",
        devices=max(placement.values()) + 1, max_steps=2, logger=False, callbacks=[books, trace],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    x = torch.randn(2 * B, 1, 8, 8) if kind == "unet" else torch.randn(2 * B, 12)
    y = torch.randn(2 * B, 3)
    trainer.fit(KINDS[kind](), torch.utils.data.DataLoader(list(zip(x, y)), batch_size=B))  # type: ignore[arg-type]
    books.order = " ".join(str(span.action) for span in trace.spans)  # type: ignore[attr-defined]
    del books.context
    return books


KINDS: dict[str, type[Plain]] = {"seed": Seed, "branches": Branched, "unet": Pictures, "fan": Fan}
BRANCHES = {"trunk": 0, "left": 0, "middle": 1, "right": 1, "join": 0, "head": 1}
PIXELS = 64
# For each rank: elements of a sample in each value that it sends, and in each gradient.
SENT: dict[str, tuple[dict[str, int], list[tuple[list[int], list[int]]]]] = {
    "seed": ({"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 0}, [([24], [16]), ([16], [24])]),
    # Rank 1 gets h once for two branches, and what joins them; rank 0 gets the right branch, not what it is joined to.
    "branches": (BRANCHES, [([16, 16], [24]), ([24], [16, 16])]),
    # The skips stay on their device; the middle is sent once it is pooled, not when it is larger again.
    "unet": (
        {"down?": 0, "middle": 1, "up": 0, "last": 0},
        [([16 * PIXELS // 4], [16 * PIXELS // 16]), ([16 * PIXELS // 16], [16 * PIXELS // 4])],
    ),
    # h once to rank 1, where three take it, a from there to rank 2; what is taken at home is not sent.
    "fan": ({"stem": 0, "a": 1, "b": 2, "c": 1, "d": 1}, [([12], []), ([12], [12, 12]), ([12], [12])]),
}


@pytest.fixture(scope="module")
def books(pool: Pool) -> Any:
    """Every rank's books of a step, made once."""
    made: dict[Any, list[Books]] = {}

    def get(kind: str, microbatches: int = 1) -> list[Books]:
        placement, sent = SENT[kind]
        if (kind, microbatches) not in made:
            made[kind, microbatches] = pool.run(len(sent), count, kind, placement, microbatches)
        return made[kind, microbatches]

    return get


@slow("*-1", "seed-*", "branches-*", "fan-2")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", SENT)
def test_each_value_that_crosses_is_sent_once_each_way(kind: str, microbatches: int, books: Any) -> None:
    for found, (values, gradients) in zip(books(kind, microbatches), SENT[kind][1], strict=True):
        for purpose, sizes in ((THERE, values), (BACK, gradients)):
            sent = found.moved.select(verb="send", axis="placement", purpose=purpose)
            expected = Counter(size * B // microbatches * FLOAT for size in sizes for _ in range(microbatches))
            assert Counter(t.nbytes for t in sent) == expected
        assert found.moved.sent(purpose=THERE) == sum(values) * B * FLOAT


@long()
def test_nothing_else_is_sent_but_one_message_of_what_the_last_stage_did(books: Any) -> None:
    for kind in SENT:
        for found in books(kind):
            rest = [t for t in found.moved.transfers if t.verb not in ("send", "recv")]
            assert {(t.axis, t.purpose, t.verb) for t in rest} == {("placement", "effects", "broadcast")}
            assert sum(t.nbytes for t in rest) < 2000


@pytest.mark.parametrize("kind", SENT)
def test_a_device_holds_its_layers_and_no_others(kind: str, books: Any) -> None:
    placement: dict[str, int] = {}
    for pattern, place in SENT[kind][0].items():
        names = [f"down{i}" for i in (1, 2)] if pattern == "down?" else [pattern]
        placement |= dict.fromkeys(names, place)
    whole = {name: p.nbytes for name, p in KINDS[kind]().named_parameters()}
    for rank, found in enumerate(books(kind)):
        own = {name: size for name, size in whole.items() if placement[name.partition(".")[0]] == rank}
        assert found.held == own and found.storage == sum(own.values())
        assert found.states == 2 * sum(own.values())


def test_branches_on_two_devices_begin_together_and_microbatches_overlap(books: Any) -> None:
    first = books("branches")[0].order.split()
    stages = max(int(action[1 : action.index(".")]) for action in first) + 1
    assert len(first) == 2 * stages
    assert {action for action in books("seed", 2)[0].order.split() if action[0] == "F"} == {
        f"F{stage}.{i}" for stage in range(3) for i in range(2)
    }
