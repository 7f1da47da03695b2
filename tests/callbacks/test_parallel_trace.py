"""What a trace says of real steps: messages are the ledger's, lines sum to the steps, and no result is changed."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import ParallelTrace, PipelineParallelStrategy, TensorParallelStrategy, pl
from lightning_par.mesh.hosts import Host
from lightning_par.mesh.ledger import ledger
from lightning_par.mesh.progress import Progress
from lightning_par.trace import collector
from lightning_par.trace.breakdown import BUBBLE, COMPUTE, PYTHON, breakdown
from lightning_par.trace.chrome import read
from lightning_par.trace.report import report
from lightning_par.trace.spans import Trace
from tests.callbacks.counted import BATCH, STRATEGIES, TOKENS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

FIRST, LAST, BATCHES = 1, 2, 4
CPU = """
name: a CPU
peak: {float32: 5.0e+10}
memory: 4.0e+9
bandwidth: 1.0e+10
units: 1
devices: 2
link: {bandwidth: 1.0e+9, latency: 1.0e-4, ramp: 1.0e+5}
network: {bandwidth: 1.0e+9, latency: 1.0e-4, ramp: 1.0e+5}
product_share: 0.8
attention_share: [0.5, 0.5]
gpu: false
"""


class Net(LightningModule):
    """Draws, so that a draw too many shows."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 16)
        self.head = nn.Linear(16, 11)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.fails, self.steps = fails, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == LAST and dist.get_rank() in self.fails:
            raise KeyError("the user's")
        logits = self.head(nn.functional.dropout(torch.relu(self.inner(self.embed(batch) * self.scale)), 0.1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.head(self.inner(self.embed(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


class Counted(ParallelTrace):
    """Has for each step what the ledger has."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.at: list[int] = []
        self.moved: Any = None
        self.recorders: set[bool] = set()

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        super().on_train_batch_start(trainer, *rest)
        self.recorders.add(trainer.strategy.groups.world.progress.recorder is None)

    def on_train_batch_end(self, *args: Any) -> None:
        self.at.append(len(self.moved.transfers))
        super().on_train_batch_end(*args)

    def counts(self) -> dict[int, Counter[tuple[str, str, str]]]:
        """By number of the step: calls by axis, purpose and verb."""
        between = zip([0, *self.at], self.at)
        return {
            number: Counter((t.axis, t.purpose, t.verb) for t in self.moved.transfers[begin:end])
            for number, (begin, end) in enumerate(between)
        }


def _trainer(strategy: Any, devices: int, callbacks: Any, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **arguments,
    )  # fmt: skip


def _run(
    name: str, path: str, traced: bool = True, validates: bool = False, machine: str | None = None,
    fails: tuple[int, ...] = (), apart: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A fit; what it came to, and what was recorded."""
    callback = Counted(first=FIRST, last=LAST, path=path, machine=machine)
    devices = 4 if "-" in name else 2
    strategy = STRATEGIES[name]()
    rows = BATCH * BATCHES * (2 if name in ("data", "fsdp", "tensor-data") else 1)
    loader = DataLoader(torch.randint(0, 11, (rows, TOKENS), generator=torch.Generator().manual_seed(0)), BATCH)
    torch.manual_seed(1)
    net, failure = Net(fails), ""
    trainer = _trainer(
        strategy, devices, [callback] if traced else [], val_check_interval=1 if validates else None,
        limit_val_batches=1 if validates else 0,
    )  # fmt: skip
    elsewhere = Host("elsewhere") if apart and dist_rank() else None
    with ledger() as callback.moved, mock.patch.object(collector, "this_host", lambda: elsewhere or Host("here")):
        try:
            trainer.fit(net, loader, loader if validates else None)
        except KeyError as error:
            failure = str(error)
    return {
        "trace": callback.trace, "counts": callback.counts() if traced else None, "failure": failure,
        "weights": {} if failure else {name: x.clone() for name, x in net.state_dict().items()},
        "recorders": callback.recorders, "left": _left(),
    }  # fmt: skip


def dist_rank() -> int:
    import os

    return int(os.environ["RANK"])


def _left() -> list[str]:
    """What a run must not leave."""
    names = [thread.name for thread in threading.enumerate() if "trace" in thread.name]
    return names + ["a recorder"] * (Progress.current.recorder is not None) + (
        ["a profiler"] if torch.autograd._profiler_enabled() else []
    )  # fmt: skip


def _told(trace: Trace) -> dict[tuple[int, int], Counter[tuple[str, str, str]]]:
    return {
        (rank.rank, step.number): Counter((m.axis, m.purpose, m.verb) for m in rank.messages_of(step))
        for rank in trace.ranks
        for step in rank.steps
    }


def _check_clock(trace: Trace) -> int:
    """No message comes before it was sent, and no sum is there before all ranks have come to it; how many were seen."""
    sides: dict[Any, list[Any]] = {}
    for rank in trace.ranks:
        for message in rank.messages:
            sides.setdefault(message.key(rank.rank), []).append((message, rank.clock.uncertainty))
    seen = 0
    for both in sides.values():
        if len(both) < 2:
            continue
        late = max((m.begin for m, _ in both if m.verb != "recv"), default=0)
        for message, _ in both:
            # Who broadcasts, or sends, may be done before anyone has it; a sum needs all.
            if message.verb in ("recv", "all_reduce", "all_gather", "reduce_scatter") and message.end is not None:
                assert message.end >= late - 2 * max(u for _, u in both), message
                seen += 1
    return seen


@long("pipeline")
@slow("data", "sequence", "placement", "pipeline-tensor", "tensor-data", "tensor")
@pytest.mark.parametrize(
    "name", ["tensor", "pipeline", "fsdp", "data", "sequence", "placement", "pipeline-tensor", "tensor-data"]
)
def test_messages_are_the_ledgers_and_lines_sum_to_the_steps(pool: Pool, tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.json"
    told = pool.run(4 if "-" in name else 2, _run, name, str(path))
    trace: Trace = told[0]["trace"]
    assert [one["trace"] is None for one in told] == [rank > 0 for rank in range(len(told))]
    assert [rank.rank for rank in trace.ranks] == [*range(len(told))] and not trace.notes
    found = _told(trace)
    assert [*found] == [(rank, step) for rank in range(len(told)) for step in (FIRST, LAST)]
    for (rank, step), counts in found.items():
        assert counts == told[rank]["counts"][step] and counts
    for (rank, number), lines in breakdown(trace).lines.items():
        (step,) = (step for step in trace.ranks[rank].steps if step.number == number)
        assert sum(lines.values()) == step.end - step.begin > 0 and lines[COMPUTE] and lines[PYTHON]
        assert step.begin < step.given < step.end
    for rank in trace.ranks:
        assert all(a.end <= b.begin for a, b in zip(rank.steps, rank.steps[1:]))
    assert _check_clock(trace)
    if "pipeline" in name:
        stages = {rank.rank: rank.stage for rank in trace.ranks}
        assert {*stages.values()} == {0, 1}
        for rank in trace.ranks:
            ran = Counter(name[0] for name, *_ in rank.actions)
            assert ran == {"F": 2 * 2, "B": 2 * 2}  # of 2 microbatches in 2 steps
    assert read(path) == trace
    assert path.with_suffix(".txt").read_text() == report(trace) + "\n" and path.with_suffix(".svg").exists()
    for one in told:
        assert one["left"] == [] and one["recorders"] == {True, False}


@slow("pipeline")
@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_no_result_is_another_with_a_trace_and_a_prediction(pool: Pool, tmp_path: Path, name: str) -> None:
    machine = tmp_path / "cpu.yaml"
    machine.write_text(CPU)
    path = tmp_path / "a.json"
    with_, without = (
        pool.run(2, _run, name, str(path), traced, True, str(machine)) for traced in (True, False)
    )  # fmt: skip
    for one, other in zip(with_, without):
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(x, other["weights"][key]) for key, x in one["weights"].items())
    trace: Trace = with_[0]["trace"]
    assert not trace.notes and trace.prediction is not None and trace.prediction.seconds > 0
    if name == "pipeline":
        parts = trace.prediction.lines
        assert parts[BUBBLE] / trace.prediction.seconds >= 1 / (2 + 1) - 0.01  # of 2 microbatches, or more
        assert parts[BUBBLE] / trace.prediction.seconds < 0.5
    assert trace.prediction.lines[COMPUTE] > 0 and f"predicted, {machine}" in report(trace)
    plain = pool.run(2, _run, name, str(path))[0]["trace"]
    assert _told(trace) == _told(plain), "a validation between two steps is part of one"


def test_ranks_of_two_hosts_come_to_one_clock(pool: Pool, tmp_path: Path) -> None:
    """Their clocks are one in truth, so the offset that was found is the error."""
    trace: Trace = pool.run(2, _run, "tensor", str(tmp_path / "a.json"), apart=True)[0]["trace"]
    clock = trace.ranks[1].clock
    assert clock.pings > 0 and abs(clock.offset) <= clock.uncertainty
    assert trace.ranks[0].clock.pings == 0 and _check_clock(trace)
    assert f"by {clock.pings} pings, to " in report(trace)


@slow("one")
@pytest.mark.parametrize("fails", [(0, 1), (1,)], ids=["both", "one"])
def test_a_run_that_an_exception_ends_leaves_what_it_has(pool: Pool, tmp_path: Path, fails: tuple[int, ...]) -> None:
    path = tmp_path / "a.json"
    if len(fails) == 2:
        told = pool.run(2, _run, "tensor", str(path), fails=fails)
        assert all("the user's" in one["failure"] and one["left"] == [] for one in told)
    else:
        with pytest.raises(Exception, match="rank 0"):
            pool.run(2, _run, "tensor", str(path), fails=fails)
    trace = read(path)
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    for rank in trace.ranks:
        assert [(step.number, step.cut) for step in rank.steps] == [(FIRST, False), (LAST, True)]
    assert f"note: rank 1 was stopped by KeyError in batch {LAST}" in report(trace)
    assert {number for _, number in breakdown(trace).lines} == {FIRST}


class Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Slept.apply(self.linear(x), 0.015)


class Sleepers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Sleeper(), Sleeper())

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


MICROBATCHES = 4


def _sleep(path: str) -> Trace | None:
    callback = ParallelTrace(2, 4, path)
    strategy = PipelineParallelStrategy(schedule="gpipe", microbatches=MICROBATCHES, stages=["layers.1"])
    trainer = _trainer(strategy, 2, callback, max_steps=6)
    trainer.fit(Sleepers(), DataLoader(torch.randn(48, 4), 8))
    return callback.trace


@slow()
def test_the_bubble_of_gpipe_is_what_it_is_on_paper(pool: Pool, tmp_path: Path) -> None:
    """(p - 1) / (m + p - 1) of the step, which is a little longer than what it sleeps."""
    trace = pool.run(2, _sleep, str(tmp_path / "a.json"))[0]
    mean = breakdown(trace).mean()
    assert mean[BUBBLE] / sum(mean.values()) == pytest.approx(1 / (MICROBATCHES + 1), abs=0.06)


def _alone(strategy: Any, steps: int) -> tuple[Trace | None, list[str]]:
    callback = ParallelTrace(1, 2)
    trainer = _trainer(strategy, 1, callback, max_steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Sleepers(), DataLoader(torch.randn(32, 4), 8))
    return callback.trace, [str(w.message) for w in caught if "ParallelTrace" in str(w.message)]


def _alone_in_turn(folder: str) -> list[Any]:
    import os

    os.chdir(folder)
    return [_alone(strategy(), steps) for strategy, steps in (
        (TensorParallelStrategy, 4), (lambda: "auto", 3), (TensorParallelStrategy, 1), (TensorParallelStrategy, 2),
    )]  # fmt: skip


def test_one_rank_other_strategies_and_runs_that_end_before(pool: Pool, tmp_path: Path) -> None:
    ((whole, none), (other, (alarm,)), (early, (early_alarm,)), (short, no_alarm)) = pool.run(
        1, _alone_in_turn, str(tmp_path)
    )[0]
    assert whole is not None and none == [] and [step.number for step in whole.ranks[0].steps] == [1, 2]
    assert whole.ranks[0].messages == () and (tmp_path / "parallel_trace.json").exists()
    assert other is None and alarm == (
        "ParallelTrace records nothing: SingleDeviceStrategy is no strategy of lightning_par."
    )
    assert early is None and early_alarm == "ParallelTrace recorded nothing: the run ended before batch 1."
    assert short is not None and no_alarm == [] and [step.number for step in short.ranks[0].steps] == [1]
    assert short.notes == ("the run ended before batch 2 did",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": 3, "last": 2}, "ParallelTrace(first=3, last=2): write 0 <= first <= last."),
        ({"first": -1}, "ParallelTrace(first=-1, last=4): write 0 <= first <= last."),
        ({"first": 0, "last": 99}, "asks for 100 steps, which are held in memory: write at most 50, as last=49."),
        ({"first": "2"}, "ParallelTrace(first='2'): write the number of a batch"),
        ({"machine": 8}, "ParallelTrace(machine=8): write a machine as"),
        ({"path": "a.svg"}, "Write path='a.json'."),
    ],
)
def test_arguments_that_can_not_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        ParallelTrace(**arguments)


def test_both_lightnings_have_it() -> None:
    import pytorch_lightning

    assert isinstance(pl.ParallelTrace(), pytorch_lightning.Callback)
