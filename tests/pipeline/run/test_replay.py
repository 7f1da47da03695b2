"""Stages run by the tape of the dry run: the same numbers as by the user's step, and only where that fits."""

from __future__ import annotations

import decimal
import functools
import io
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.run.engine import Engine
from lightning_par.pipeline.run.replay import Replays
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

WIDTH, WORDS, TOKENS, MICROBATCHES, STEPS = 8, 16, 4, 3, 4
FLAG = [0]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class GPT(L.LightningModule):
    """Plain."""

    dropout = 0.0
    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(self.block(i) for i in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def block(self, i: int) -> nn.Module:
        return Block(self.dropout)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, ids: Tensor) -> Tensor:
        x = self.norm(self.run_blocks(self.embed(ids)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        loss = self.loss(ids)
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(ids))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByStep(GPT):
    """Goes another way in every second step."""

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        loss = self.loss(ids)
        if self.global_step % 2:
            loss = loss * (1.0 + 0.1 * self.global_step)
            self.log("odd", loss)
        return loss


class Drops(GPT):
    """Layers and the step itself drop at random."""

    dropout = 0.3

    def embed(self, ids: Tensor) -> Tensor:
        return F.dropout(super().embed(ids), 0.2)


class LaterShift(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.holder[0].global_step >= 2:
            FLAG[0] += 1
            x = x * 1.1
        return super().forward(x)


class BeginsToKeep(GPT):
    """A layer begins to change something that others reach in the third step."""

    def block(self, i: int) -> nn.Module:
        block = LaterShift() if i == 1 else Block()
        block.holder = [self]
        return block

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        loss = self.loss(ids)
        self.log("loss", loss + 0 * len(FLAG))
        return loss


@contextmanager
def shifted(module: GPT) -> Iterator[None]:
    module.shift = 0.5
    try:
        yield
    finally:
        module.shift = 0.0


class Shifts(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.holder[0].shift


class SetForAWhile(GPT):
    """The step sets, around a layer, what that goes by."""

    def block(self, i: int) -> nn.Module:
        block = Shifts()
        block.holder = [self]
        return block

    def run_blocks(self, x: Tensor) -> Tensor:
        with shifted(self):
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x


class WithoutGradients(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.gelu else result


class UnderAMode(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        with Doubled():
            return super().run_blocks(x)


class PatchesALibrary(GPT):
    """Around one layer a function of torch is another."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            with mock.patch.object(F, "gelu", F.relu) if i % 2 else nullcontext():
                x = block(x)
        return x


class Tanhs(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class PatchesTensors(GPT):
    """Around one layer a method of tensors is another."""

    def block(self, i: int) -> nn.Module:
        return Tanhs()

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            with mock.patch.object(Tensor, "tanh", Tensor.sigmoid) if i == 1 else nullcontext():
                x = block(x)
        return x


class Precise(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + decimal.getcontext().prec / 100)


class SetsAContext(GPT):
    """Around one layer a library's context is another."""

    def block(self, i: int) -> nn.Module:
        return Precise()

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            with decimal.localcontext(decimal.Context(prec=5 + i)):
                x = block(x)
        return x


class LateAnd(Block):
    """Changes what others reach once nothing that a trial of it could see says so."""

    def forward(self, x: Tensor) -> Tensor:
        if sys.getrecursionlimit() % 2:
            FLAG[0] += 1
        return super().forward(x)


class DropsLate(Block):
    """Draws, and says so, once nothing that a trial of it could see tells that it will."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if sys.getrecursionlimit() % 2:
            print("a draw")
            return F.dropout(x, 0.5)
        return x


class DropsIntoAFile(Block):
    """Writes a byte to a file, of which nobody can take it back."""

    file = 0

    def forward(self, x: Tensor) -> Tensor:
        os.write(self.file, b".")
        return F.dropout(super().forward(x), 0.3)


class ForeseenDraws(GPT):
    def block(self, i: int) -> nn.Module:
        return DropsIntoAFile() if i % 2 else Block()


class CountsAndDropsLate(DropsLate):
    """Counts what it drops."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if sys.getrecursionlimit() % 2:
            self.seen += 1
        return super().forward(x)


class ListsAndDropsLate(DropsLate):
    """Notes what it drops in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []

    @property
    def seen(self) -> int:
        return len(self.noted)

    def forward(self, x: Tensor) -> Tensor:
        if sys.getrecursionlimit() % 2:
            self.noted.append(1)
        return super().forward(x)


@functools.lru_cache
def remembered_noise(name: str) -> Tensor:
    return torch.rand(WIDTH, dtype=torch.float64)


class RemembersLate(Block):
    """Remembers what it draws, and prints it, once nothing that a trial of it could see tells that it will."""

    held: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if not sys.getrecursionlimit() % 2:
            return x
        if self.held is None:
            self.held = torch.rand(WIDTH, dtype=torch.float64)
            print("a draw", float(self.held[0]))
        return x + self.held * remembered_noise("noise")


class UnforeseenDraws(GPT):
    def block(self, i: int) -> nn.Module:
        return DropsLate() if i % 2 else Block()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            sys.setrecursionlimit(sys.getrecursionlimit() | 1)

    def on_train_end(self) -> None:
        sys.setrecursionlimit(sys.getrecursionlimit() & ~1)


class Unforeseen(GPT):
    def block(self, i: int) -> nn.Module:
        return LateAnd() if i == 1 else Block()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            sys.setrecursionlimit(sys.getrecursionlimit() | 1)

    def on_train_end(self) -> None:
        sys.setrecursionlimit(sys.getrecursionlimit() & ~1)

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        loss = self.loss(ids)
        self.log("flag", float(FLAG[0]))
        return loss


class UnforeseenNoise(UnforeseenDraws):
    def block(self, i: int) -> nn.Module:
        return RemembersLate() if i % 2 else Block()


class UnforeseenCounts(UnforeseenDraws):
    def block(self, i: int) -> nn.Module:
        return CountsAndDropsLate()


class UnforeseenNotes(UnforeseenDraws):
    def block(self, i: int) -> nn.Module:
        return ListsAndDropsLate()


class Halved(Block):
    gain = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Tripled(Halved):
    gain = 3.0


class Raised(Halved):
    gain = 1.5


class SetsAClass(GPT):
    """Around one layer its class is another, with the same code."""

    def block(self, i: int) -> nn.Module:
        return Raised()

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.__class__ = Tripled if i == 1 else Raised
            x = block(x)
            block.__class__ = Raised
        return x


class GoesBySettings(Block):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"gains": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings["gains"][0]


class SetsWithin(GPT):
    """Around one layer something is set in an object that the layer alone holds."""

    def block(self, i: int) -> nn.Module:
        return GoesBySettings()

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.settings["gains"][0] = 2.0 if i == 1 else 1.0
            x = block(x)
            block.settings["gains"][0] = 1.0
        return x


class SetsWithinLater(SetsWithin):
    """As that, from the third step on, of which the other steps do not tell."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.settings["gains"][0] = 2.0 if i == 1 and self.global_step >= 2 else 1.0
            x = block(x)
            block.settings["gains"][0] = 1.0
        return x


class GoesByAnInnerSetting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.gains = ([{"now": 1.0}],)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.inner.gains[0][0]["now"]  # type: ignore[index]


class SetsWithinTorchs(GPT):
    """Around one layer something is set in a module of torch that is in it."""

    def block(self, i: int) -> nn.Module:
        return GoesByAnInnerSetting()

    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.inner.gains[0][0]["now"] = 2.0 if i == 1 else 1.0
            x = block(x)
            block.inner.gains[0][0]["now"] = 1.0
        return x


class Prints(GPT):
    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        print("a step")
        return super().training_step(ids, batch_idx)


class InPlace(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids).mul_(1.5)


class SetsWhatIsNoEvent(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids).detach()
        x.requires_grad = True
        return x


class DrawsOfRandom(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * (1 + random.random())


class KeepsAnOutput(GPT):
    """Only the run that counts has to be the user's step."""

    seen: Tensor | None = None

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        loss = self.loss(ids)
        self.seen = loss.detach()
        return loss


def _fit(make: type[GPT], how: str, schedule: str = "1f1b", validated: int = 1, missing: int = 1) -> Any:
    """Parameters and metrics after training and so many batches of validation; which runs of stages were replayed.

    ``missing`` is how many samples the last batch has less than the others, which need no other program without it.
    """
    L.seed_everything(0, verbose=False)
    torch.set_default_dtype(torch.float64)
    taken: list[bool] = []
    rehearsing: list[bool] = []  # not empty while the first batch is compared cut and uncut
    before = Replays.run, Replays.begin, Engine.rehearse

    def rehearse(self: Engine, *args: Any) -> Any:
        rehearsing.append(True)
        try:
            return before[2](self, *args)
        finally:
            rehearsing.clear()

    def run(self: Replays, *args: Any) -> Any:
        found = before[0](self, *args)
        taken.extend([] if rehearsing else [found is not None])
        return found

    def begin(self: Replays, ready: Any, apart: bool) -> None:
        before[1](self, ready, apart or how == "as ever")

    Replays.run, Replays.begin, Engine.rehearse = run, begin, rehearse  # type: ignore[method-assign]
    try:
        FLAG[0] = 0
        remembered_noise.cache_clear()
        data = torch.randint(0, WORDS, (6 * STEPS - missing, TOKENS))
        strategy = PipelineParallelStrategy(schedule=schedule, microbatches=MICROBATCHES)
        trainer = L.Trainer(
            strategy="auto" if how == "one device" else strategy, devices=1 if how == "one device" else 2,
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=validated,
        )  # fmt: skip
        module = make()
        loader = torch.utils.data.DataLoader(data, batch_size=6)  # type: ignore[arg-type]
        trainer.fit(module, loader, loader)
        found = {name: p.detach().clone() for name, p in module.named_parameters()}
        found |= {name: torch.as_tensor(x) for name, x in trainer.callback_metrics.items()}
        return found, taken
    finally:
        Replays.run, Replays.begin, Engine.rehearse = before  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name].double(), x.double(), rtol=1e-9, atol=1e-11, msg=name)


@long()
@slow(but=["ByStep-1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("make", [GPT, ByStep])
def test_a_plain_step_is_replayed_in_every_microbatch(pool: Pool, make: type[GPT], schedule: str) -> None:
    ((expected, _),) = pool.run(1, _fit, make, "one device", schedule, STEPS)
    for found, taken in pool.run(2, _fit, make, "replayed", schedule, STEPS):
        assert_same(found, expected)
        assert taken and all(taken)


@long()
def test_what_is_drawn_is_what_the_step_would_draw(pool: Pool) -> None:
    for (found, taken), (expected, none) in zip(
        pool.run(2, _train, Drops, "replayed"), pool.run(2, _train, Drops, "as ever"), strict=True
    ):
        assert all(taken) and not any(none)
        assert all(torch.equal(found[name], x) for name, x in expected.items())


class Forks(Block):
    """Draws, and leaves the generator where it was."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if sys.getrecursionlimit() % 2:
            print("a draw")
            with torch.random.fork_rng():
                return x + torch.rand_like(x)
        return x


class UnforeseenForks(UnforeseenDraws):
    def block(self, i: int) -> nn.Module:
        return Forks() if i % 2 else Block()


def _train(make: type[GPT], how: str) -> Any:
    """As `_fit`, in batches of one size, without validation: for what is of training alone."""
    return _fit(make, how, validated=0, missing=0)


def _fit_and_listen(make: type[GPT], how: str) -> Any:
    with redirect_stdout(io.StringIO()) as said:
        found, taken = _train(make, how)
    return found, taken, [line for line in said.getvalue().splitlines() if line.startswith("a draw")]


@long()
@slow("UnforeseenDraws")
@pytest.mark.parametrize("make", [UnforeseenDraws, UnforeseenForks])
def test_what_is_drawn_unforeseen_is_what_the_step_would_draw(pool: Pool, make: type[GPT]) -> None:
    """And the layer that runs again for it says once what it says."""
    for (found, taken, said), (expected, none, as_ever) in zip(
        pool.run(2, _fit_and_listen, make, "replayed"),
        pool.run(2, _fit_and_listen, make, "as ever"),
        strict=True,
    ):
        assert all(taken) and not any(none)
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert said == as_ever != []


@long()
def test_what_a_layer_remembers_of_unforeseen_draws_is_what_the_step_would_draw(pool: Pool) -> None:
    """And it says what it drew: neither stays of the run in which nobody expected it to draw."""
    for (found, _, said), (expected, _, as_ever) in zip(
        pool.run(2, _fit_and_listen, UnforeseenNoise, "replayed"),
        pool.run(2, _fit_and_listen, UnforeseenNoise, "as ever"),
        strict=True,
    ):
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert said == as_ever != []


def _fit_and_write(make: type[GPT], how: str) -> int:
    with tempfile.TemporaryFile() as file, mock.patch.object(DropsIntoAFile, "file", file.fileno()):
        _train(make, how)
        return os.fstat(file.fileno()).st_size


@long()
def test_a_layer_that_is_seen_to_draw_runs_as_often_as_in_the_step(pool: Pool) -> None:
    counts = pool.run(2, _fit_and_write, ForeseenDraws, "replayed")
    assert counts == pool.run(2, _fit_and_write, ForeseenDraws, "as ever") and all(counts)


def _fit_and_count(make: type[GPT], how: str) -> list[int]:
    made: list[GPT] = []
    _train(lambda: made.append(make()) or made[0], how)  # type: ignore[arg-type,func-returns-value]
    return [block.seen for block in made[0].blocks]  # type: ignore[misc]


@long()
@slow("UnforeseenCounts")
@pytest.mark.parametrize("make", [UnforeseenCounts, UnforeseenNotes])
def test_what_a_layer_keeps_that_draws_unforeseen_it_keeps_once(pool: Pool, make: type[GPT]) -> None:
    """It is not run again for what it drew."""
    counts = pool.run(2, _fit_and_count, make, "replayed")
    assert counts == pool.run(2, _fit_and_count, make, "as ever")
    assert any(map(any, counts))


@long()
@slow(but=["PatchesALibrary"])
@pytest.mark.parametrize(
    "make",
    [
        SetForAWhile,
        WithoutGradients,
        UnderAMode,
        InPlace,
        SetsWhatIsNoEvent,
        DrawsOfRandom,
        BeginsToKeep,
        PatchesALibrary,
        SetsAContext,
        SetsAClass,
        SetsWithin,
        SetsWithinLater,
        SetsWithinTorchs,
        PatchesTensors,
    ],
)
def test_other_steps_are_run_as_ever(pool: Pool, make: type[GPT]) -> None:
    """At least on the rank where what they do matters."""
    ((expected, _),) = pool.run(1, _fit, make, "one device")
    ranks = pool.run(2, _fit, make, "replayed")
    for found, _ in ranks:
        assert_same(found, expected)
    assert not all(all(taken) for _, taken in ranks)


@long()
@slow("Prints")
@pytest.mark.parametrize("make", [Prints, KeepsAnOutput])
def test_the_run_that_counts_is_the_users_where_it_does_more_than_to_log(pool: Pool, make: type[GPT]) -> None:
    ((expected, _),) = pool.run(1, _fit, make, "one device")
    first, last = pool.run(2, _fit, make, "replayed")
    assert_same(first[0], expected)
    assert_same(last[0], expected)
    assert all(first[1]) and not all(last[1])


@long()
def test_what_a_layer_begins_to_change_unforeseen_is_undone_as_ever(pool: Pool) -> None:
    expected = pool.run(2, _train, Unforeseen, "as ever")
    for rank, (found, taken) in enumerate(pool.run(2, _train, Unforeseen, "replayed")):
        assert_same(found, expected[rank][0])
        assert all(taken[: 2 * MICROBATCHES])
        assert all(taken[2 * MICROBATCHES : 3 * MICROBATCHES]) == bool(rank)  # the layer is on rank 0
