"""One rank of a job is killed with SIGKILL: the others must end soon, and leave no process behind.

``python -m tests.endurance.kills --times 5`` kills a random rank at five moments of a run, under six strategies,
started by Lightning's launcher and by `torchrun`: processes as a user starts them, on this host. It prints how long
each job took to be gone, and which processes were left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2, microbatches=2),
    "sequence": dict(sequence_parallel_size=2),
    "placement": dict(placement={"embedding": 0, "up": 1, "down": 0, "head": 1}),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
    "tensor x pipeline": dict(tensor_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
}
MOMENTS = ("start-up", "step", "validation", "saving", "end")
LAUNCHERS = ("Lightning", "torchrun")
BAR = 10.0  # seconds
_WAIT = 60.0  # seconds until who is left is an orphan
_MARK = "LIGHTNING_PAR_KILLS"  # an environment variable, by which all processes of a job are known


def ranks_of(strategy: str) -> int:
    return 4 if strategy == "tensor x pipeline" else 2


def job(folder: Path, strategy: str, moment: str, victim: int, delay: float) -> None:
    """What each rank runs; the victim kills itself ``delay`` seconds after it has come to the moment."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import Tensor, nn

    from lightning_par import HybridParallelStrategy

    def come(to: str) -> None:
        if to == moment and int(os.environ.get("LOCAL_RANK", "0")) == victim:
            threading.Timer(delay, kill).start()

    def kill() -> None:
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up = nn.Embedding(32, 128), nn.Linear(128, 1024)
            self.down, self.head = nn.Linear(1024, 128), nn.Linear(128, 32)

        def setup(self, stage: str) -> None:
            come("start-up")

        def _loss(self, batch: Tensor) -> Tensor:
            logits = self.head(self.down(nn.functional.gelu(self.up(self.embedding(batch)))))
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                come("step")
            return self._loss(batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                come("validation")
            self.log("loss", self._loss(batch))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            come("saving")

        def on_train_end(self) -> None:
            come("end")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.001)

    torch.set_num_threads(1)
    data = torch.utils.data.DataLoader(torch.randint(0, 32, (32, 8)), batch_size=4)  # type: ignore[arg-type]
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        strategy=HybridParallelStrategy(**STRATEGIES[strategy]),
        accelerator="cpu",
        devices=ranks_of(strategy),
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, every_n_epochs=1)],
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Model(), data, data)
    time.sleep(1.0)  # who was to be killed at the end is


@dataclass(frozen=True)
class Kill:
    """One job that a rank is killed in.

    Args:
        launcher: of `LAUNCHERS`.
        strategy: of `STRATEGIES`.
        moment: of `MOMENTS`.
        victim: the rank.
        delay: seconds between the moment and the kill.
    """

    launcher: str
    strategy: str
    moment: str
    victim: int
    delay: float

    def __str__(self) -> str:
        return f"{self.launcher}, {self.strategy}, {self.moment} + {1000 * self.delay:.0f} ms, rank {self.victim}"

    def command(self, folder: Path) -> list[str]:
        told = [str(folder), self.strategy, self.moment, str(self.victim), str(self.delay)]
        if self.launcher == "torchrun":
            ranks = str(ranks_of(self.strategy))
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m"]
        else:
            start = ["-m"]
        return [sys.executable, *start, "tests.endurance.kills", "--job", *told]


@dataclass(frozen=True)
class Outcome:
    """What became of the others.

    Args:
        seconds: from the kill until no process of the job was left; None where it never came to the kill.
        orphans: the processes that were left after a minute.
        said: what the job printed.
    """

    seconds: float | None
    orphans: int
    said: str

    @property
    def good(self) -> bool:
        return self.seconds is not None and self.seconds <= BAR and not self.orphans


def run(kill: Kill, start: Callable[..., Any] = subprocess.Popen) -> Outcome:
    """Start the job, and watch it."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as said:
        folder = Path(name)
        env = dict(os.environ, OMP_NUM_THREADS="1", **{_MARK: mark})
        env = {key: x for key, x in env.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
        process = start(kill.command(folder), env=env, stdout=said, stderr=said, start_new_session=True)
        while not (folder / "killed").exists() and process.poll() is None:
            time.sleep(0.02)
        killed = (folder / "killed").stat().st_mtime if (folder / "killed").exists() else None
        end = time.time() + _WAIT
        while (left := alive(mark, process)) and time.time() < end:
            time.sleep(0.05)
        seconds = None if killed is None else time.time() - killed
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        said.seek(0)
        return Outcome(seconds, len(left), said.read())


def alive(mark: str, process: subprocess.Popen[Any]) -> list[int]:
    """The processes of a job, those included that nobody waits for."""
    process.poll()  # else it stays as a zombie
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def main() -> None:
    if "--job" in sys.argv:
        folder, strategy, moment, victim, delay = sys.argv[sys.argv.index("--job") + 1 :]
        return job(Path(folder), strategy, moment, int(victim), float(delay))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launchers", nargs="+", default=LAUNCHERS, choices=LAUNCHERS)
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=[*STRATEGIES])
    parser.add_argument("--moments", nargs="+", default=MOMENTS, choices=MOMENTS)
    asked = parser.parse_args()
    draw, outcomes = random.Random(asked.seed), []
    for _ in range(asked.times):
        for cell in product(asked.launchers, asked.strategies, asked.moments):
            kill = Kill(*cell, draw.randrange(ranks_of(cell[1])), draw.uniform(0, 0.03))
            outcome = run(kill)
            outcomes.append(outcome)
            time_taken = "never killed" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
            print(f"{kill}: {time_taken}, {outcome.orphans} left{'' if outcome.good else '  <--'}", flush=True)
            if not outcome.good:
                print(outcome.said[-3000:], flush=True)
    slowest = max((outcome.seconds or 0.0 for outcome in outcomes), default=0.0)
    print(f"{sum(x.good for x in outcomes)} of {len(outcomes)} down within {BAR:.0f} s; the slowest {slowest:.1f} s")


if __name__ == "__main__":
    main()
