"""Runs that stand still on real ranks: the report, the error that follows, and a look from outside."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy
from lightning_par import __main__ as commands
from lightning_par.hang_report.look import ask
from lightning_par.mesh.progress import Progress
from lightning_par.mesh.side_channel import call
from tests.endurance.hangs import STRATEGIES, Case, problems
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

CASES = [
    Case.of(40, "tensor", "sleep"),
    Case.of(41, "pipeline", "spin"),
    Case.of(42, "sequence", "stop"),
    Case.of(43, "tensor", "branch"),
    *(Case.of(seed) for seed in range(44, 44 + 4 * len(STRATEGIES))),
]


@long()
@slow(but=[f"{case.strategy}-{case.kind}-{case.seed}" for case in CASES[:1]])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.kind}-{case.seed}")
def test_who_holds_up_a_run_is_named(pool: Pool, case: Case, tmp_path: Path) -> None:
    assert not [*problems(case, pool, tmp_path)]


class Net(L.LightningModule):
    def __init__(self, then: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.then = then

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.then(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, then: Any, folder: Path | None = None) -> None:
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Net(then), torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2))  # type: ignore[arg-type]


def _dies(strategy: Any) -> str:
    def then(module: Any) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError) as raised:
        fit(strategy(timeout=timedelta(seconds=30)), then)
    return str(raised.value)


def _dies_and_tells(strategy: Any) -> None:
    raise AssertionError(_dies(strategy))


def test_that_a_process_has_ended_is_said_when_it_has(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _dies_and_tells, TensorParallelStrategy)
    assert "Rank 1 (pid " in failed.value.reports[0] and ": its process has ended." in failed.value.reports[0]


def _late(folder: Path) -> str:
    """Rank 1 comes too late, and lives: rank 0's error must not say that it has died, nor rank 1's of rank 0."""

    def then(module: Any) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(5.0)

    strategy = PipelineParallelStrategy(microbatches=1, timeout=timedelta(seconds=3), hang_report_after=1.0)
    with pytest.raises(RuntimeError) as raised:
        fit(strategy, then, folder)
    time.sleep(4.0 if os.environ["RANK"] == "0" else 0.0)  # else it would have ended
    return str(raised.value)


@slow()
def test_of_a_rank_that_is_late_no_error_says_that_it_has_died(pool: Pool, tmp_path: Path) -> None:
    for rank, text in enumerate(pool.run(2, _late, tmp_path)):
        assert "has ended" not in text, text
        assert rank or "Likely culprit: rank 1, which sleeps" in text


def _looked_at(folder: Path) -> list[Any]:
    """What rank 0 is told of the run that it is in, as one is outside who knows the address; and rank 1 sleeps."""
    told: list[Any] = []

    def then(module: Any) -> None:
        watch = module.trainer.strategy._watch
        if os.environ["RANK"] == "1":
            while not (folder / "seen").exists():
                time.sleep(0.05)
        elif not told:
            while not ask(watch.address)[1].place.endswith(" in then"):
                time.sleep(0.05)  # it is still on its way
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = commands.main(["stacks", watch.address])
            told.extend([code, out.getvalue(), [state.rank for state in ask(watch.address)]])
            host, _, port = watch.address.rpartition(":")
            for question in ({"ask": "report"}, {"ask": "state", "conclusion": "x"}, "state", ["stacks"], None):
                with call((host, int(port), "guessed"), question, 10.0) as line:
                    told.append(line.hear())
            with socket.create_connection((host, int(port)), 10.0) as connection:
                connection.sendall(b"\xff" * 8)
                told.append(connection.recv(10))
            told.append([watch._wanted.is_set(), watch._conclusion])
            (folder / "seen").touch()

    before = threading.active_count(), Progress.current
    fit(TensorParallelStrategy(timeout=timedelta(seconds=60)), then)
    assert (threading.active_count(), Progress.current) == before
    return told


def test_a_run_is_looked_at_from_outside_and_not_changed(pool: Pool, tmp_path: Path) -> None:
    code, text, ranks, *refused, garbled, untouched = pool.run(2, _looked_at, tmp_path)[0]
    assert code == 0 and ranks == [0, 1] and "Python stack of rank 1:" in text and "time.sleep(0.05)" in text
    assert "in then" in text and "in training, epoch 0, batch 0" in text
    assert refused == [{"failure": "the only question is 'stacks'"}] * 5
    assert garbled == b"" and untouched == [False, ""]


def _off(after: float | None) -> tuple[int, bool]:
    seen: list[int] = []
    strategy = TensorParallelStrategy(hang_report_after=after)
    fit(strategy, lambda module: seen.append(sum("hang" in t.name for t in threading.enumerate())))
    return max(seen), strategy._watch is None


def test_nothing_is_watched_where_nothing_is_asked_for(pool: Pool) -> None:
    assert pool.run(2, _off, None) == [(0, True)] * 2


@pytest.mark.parametrize(
    "address, message",
    {
        "nowhere": "'nowhere' is no address: write HOST:PORT",
        "host:99999": "is no address",
        "127.0.0.1:1": "No rank answers at 127.0.0.1:1",
    }.items(),
)
def test_wrong_addresses_are_one_plain_line(address: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["stacks", address]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("lightning_par stacks: ") and message in errors and errors.count("\n") == 1


def test_what_is_no_rank_is_told_from_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"\0" * 7 + b"\x02{}")

        thread = threading.Thread(target=answer)
        thread.start()
        assert commands.main(["stacks", f"127.0.0.1:{server.getsockname()[1]}"]) == 2
        thread.join()
    assert "is no rank of a job" in capsys.readouterr().err
