"""Ranks that hold up a run, at random moments: does the hang report name them?

Run as ``python -m tests.endurance.hangs --cases 20 --seed 0``. A case is made from its seed alone, which is printed. A
rank sleeps, spins in Python, is stopped by SIGSTOP or takes another branch in some step, at some place of the user's
code. It goes on once the report is there, and the run must come to its end; after a branch it must end in an error that
names the rank, too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.helpers.pool import Pool, RanksFailedError

AFTER = 2.0  # seconds until a report
TIMEOUT = 7.0  # seconds until an error, after a branch; else much longer
STEPS = 6
VOCABULARY, WIDTH, TOKENS = 32, 16, 8
STRATEGIES: dict[str, tuple[int, Callable[..., Any]]] = {
    "tensor": (2, TensorParallelStrategy),
    "pipeline": (2, lambda **options: PipelineParallelStrategy(microbatches=2, **options)),
    "sequence": (2, SequenceParallelStrategy),
    "placement": (2, lambda **options: LayerPlacementStrategy({"blocks.0": 0, "blocks.1": 1}, **options)),
    "fsdp": (2, lambda **options: HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp", **options)),
    "tensor x pipeline": (
        4, lambda **options: HybridParallelStrategy(pipeline_parallel_size=2, tensor_parallel_size=2, **options),
    ),
}  # fmt: skip
KINDS = ("sleep", "spin", "stop", "branch")
PLACES = ("training_step", "block", "data", "batch start", "backward", "batch end", "validation_step", "saving")


@dataclass(frozen=True)
class Case:
    """What goes wrong, where and when."""

    seed: int
    strategy: str
    kind: str
    rank: int
    step: int
    place: str

    @classmethod
    def of(cls, seed: int, strategy: str | None = None, kind: str | None = None) -> Case:
        """The case of a seed; of those of a row each kind and strategy comes in turn."""
        draw = random.Random(seed)
        strategy = strategy or [*STRATEGIES][seed % len(STRATEGIES)]
        kind = kind or KINDS[(seed + seed // len(STRATEGIES)) % len(KINDS)]
        places = PLACES if kind != "branch" else ("training_step", "batch start", "batch end", "backward")
        rank, step = draw.randrange(STRATEGIES[strategy][0]), draw.randrange(1, STEPS)
        return cls(seed, strategy, kind, rank, step, draw.choice(places))

    @property
    def is_branch(self) -> bool:
        return self.kind == "branch"


class Fault:
    """Happens once, on one rank, until the folder has a report. The places are met by each rank."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.module: Any = None

    def at(self, place: str) -> None:
        case = self.case
        trainer = None if self.module is None else self.module._trainer
        if (
            place != case.place
            or (self.folder / "began").exists()
            or trainer is None
            or trainer.global_step < case.step
        ):
            return
        if int(os.environ["RANK"]) != case.rank or trainer.sanity_checking:
            return
        # A file, since a trial of the step has what it changed in Python's state put back.
        (self.folder / "began").write_text(str(time.time()))
        getattr(self, case.kind)()

    def reported(self) -> bool:
        return bool(reports(self.folder))

    def sleep(self) -> None:
        while not self.reported():
            time.sleep(0.2)

    def settle(self) -> None:
        """At the end of a run: one that is to be stopped at a moment of the run is stopped before it has ended."""
        while self.case.kind == "stop" and self.struck() and not self.reported():
            time.sleep(0.02)

    def struck(self) -> bool:
        """Whether this rank is the one that something has happened to."""
        return int(os.environ["RANK"]) == self.case.rank and (self.folder / "began").exists()

    def spin(self) -> None:
        number = 0
        while number % 1_000_000 or not self.reported():
            number += 1

    def stop(self) -> None:
        """From another process, which lets it go on: within 0.2 s, wherever it is by then."""
        own = os.getpid()
        if os.fork() == 0:
            try:
                time.sleep(random.Random(self.case.seed).random() * 0.2)
                os.kill(own, signal.SIGSTOP)
                end = time.monotonic() + 60
                while not self.reported() and time.monotonic() < end:
                    time.sleep(0.1)
                time.sleep(0.3)
                os.kill(own, signal.SIGCONT)
            finally:
                os._exit(0)

    def branch(self) -> None:
        """A wait for other ranks that they don't come to."""
        if self.case.seed % 2:
            self.module.trainer.strategy.barrier()
            return
        x = torch.zeros(1)
        torch.distributed.recv(x, (self.case.rank + 1) % int(os.environ["WORLD_SIZE"]), tag=999)


def reports(folder: Path) -> list[Path]:
    """The reports since the fault began, the first one first."""
    began = folder / "began"
    if not began.exists() or not began.read_text():
        return []
    since = float(began.read_text())
    found = [path for path in folder.glob("hang_report*.txt") if path.stat().st_mtime >= since + 0.5 * AFTER]
    return sorted((path for path in found if path.stat().st_size), key=lambda path: path.stat().st_mtime)


class Block(nn.Module):
    """Attention and a product."""

    def __init__(self, fault: list[Fault]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        for fault in self.fault:
            fault.at("block")
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(L.LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.faults = [fault]
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(self.faults), Block(self.faults))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(batch)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.faults[0].at("training_step")
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.faults[0].at("validation_step")
        self.log("val_loss", self.loss(batch))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.faults[0].at("batch start")

    def on_after_backward(self) -> None:
        self.faults[0].at("backward")

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.faults[0].at("batch end")

    def on_train_end(self) -> None:
        self.faults[0].settle()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.faults[0].at("saving")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Tokens(Dataset[Tensor]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 4 * 2 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        self.fault.at("data")
        return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))


def fit(case: Case, folder: Path) -> int:
    """The steps that ran."""
    threads = threading.active_count()
    fault = Fault(case, folder)
    devices, strategy = STRATEGIES[case.strategy]
    timeout = timedelta(seconds=TIMEOUT if case.is_branch else 120)
    trainer = L.Trainer(
        strategy=strategy(hang_report_after=AFTER, timeout=timeout),
        accelerator="cpu", devices=devices, max_steps=STEPS, default_root_dir=folder, logger=False,
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(folder / "saved", every_n_train_steps=2)],
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=2, limit_val_batches=1,
        num_sanity_val_steps=0,
    )  # fmt: skip
    module = Net(fault)
    fault.module = module
    loader = DataLoader(Tokens(fault), batch_size=4)
    trainer.fit(module, loader, loader)
    assert threading.active_count() <= threads + 3, threading.enumerate()  # gloo's are none of Python's
    return trainer.global_step


def problems(case: Case, pool: Pool, folder: Path) -> Iterator[str]:
    """What is wrong with what comes of a case."""
    size, failed = STRATEGIES[case.strategy][0], {}
    try:
        steps = pool.run(size, fit, case, folder, timeout=90, grace=60)
        if steps != [STEPS] * size:
            yield f"the run did not come to its end: {steps}"
    except RanksFailedError as error:
        failed = error.reports
        if not case.is_branch:
            yield f"the run failed: {error}"
    if not (folder / "began").exists():
        yield "nothing happened"
        return
    found = reports(folder)
    if not found:
        yield "there is no report"
        return
    text = found[0].read_text()
    line = conclusion(text)
    # Of two ranks in different branches none is the one that should have come to the other's.
    either = case.is_branch and size == 2 and "wait for one another" in line
    if culprits(line) != ({0, 1} if either else {case.rank}):
        yield f"the report names {culprits(line)}:\n{text}"
    _, stack, rest = text.partition(f"Python stack of rank {case.rank}:")
    if not stack or (case.kind != "stop" and "hangs.py" not in rest.partition("Python stack of rank")[0]):
        yield f"the report has no stack of rank {case.rank}:\n{text}"
    if len(found) > 1:
        yield f"there are {len(found)} reports:\n" + "\n".join(path.read_text() for path in found)
    if case.is_branch and not any(line in report for report in failed.values()):
        yield f"no error names the culprit, {line}: {failed}"


def conclusion(text: str) -> str:
    """The line that names the likely culprit."""
    return next((line for line in text.splitlines() if line.startswith(("Likely", "No likely"))), "")


def culprits(line: str) -> set[int]:
    """Whom that line names."""
    match = re.match(r"Likely culprits?: ranks? ([\d, -]+)", line)
    numbers = [part for part in (match[1] if match else "").split(",") if part.strip(" -")]
    return {n for part in numbers for n in range(int(part.split("-")[0]), int(part.strip(" -").split("-")[-1]) + 1)}


def main() -> int:
    """Run the cases; the exit code says whether all of them were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--strategy", choices=STRATEGIES)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--show", action="store_true", help="print the reports")
    asked = parser.parse_args()
    wrong, pool = 0, Pool()
    try:
        for seed in range(asked.seed, asked.seed + asked.cases):
            case = Case.of(seed, asked.strategy, asked.kind)
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                found = [*problems(case, pool, Path(folder))]
                wrong += bool(found)
                print("wrong" if found else "right", case, f"{time.monotonic() - began:.1f} s", *found, sep="  ")
                if asked.show:
                    print(*(path.read_text() for path in reports(Path(folder))), sep="\n")
            sys.stdout.flush()
    finally:
        pool.close()
    print(f"{asked.cases - wrong} of {asked.cases} right")
    return int(wrong > 0)


if __name__ == "__main__":
    from tests.endurance import hangs  # ranks know its classes by this name

    sys.exit(hangs.main())
