"""Activation peaks of real runs, by the bytes of live tensors, against the planner's:
``python -m tests.planner.peaks [--model NAME] [--layout NAME] [--where]``.

Counted are the tensors that a rank makes in a training step while gradients are there already, as in the second batch
of an accumulation window: activations, and buffers of communication. ``--where`` says what lives at the peak, by the
lines that made it; ``--kept FILE`` keeps what was counted there, and counts only what is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.planner import Planner
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.planner.counted import CASES, LAYOUTS, batch_of, ranks_of

WITHIN = 0.05
DEPTH = 4  # frames of this package that a line of `--where` shows


class _Located(LiveBytes):
    """Knows where each tensor was made."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int]] = []  # number of the memory, bytes
        self.sites: dict[int, str] = {}
        self.count = 0
        self.serial: dict[int, int] = {}

    def _made(self, number: int, memory: torch.UntypedStorage) -> None:
        if number not in self._known and memory.nbytes():
            self.count += 1
            self.serial[number] = self.count
            self.sites[self.count] = f"{memory.nbytes():>9,} {_site()}"
            self.log.append((self.count, memory.nbytes()))
        super()._made(number, memory)

    def _freed(self, number: int, size: int) -> None:
        self.log.append((self.serial[number], -size))
        super()._freed(number, size)

    def at_peak(self) -> Counter[str]:
        """Bytes that live at the peak, by where they were made."""
        now = most = 0
        best = 0
        for place, (_, size) in enumerate(self.log):
            now += size
            if now > most:
                most, best = now, place
        live: dict[int, int] = {}
        for serial, size in self.log[: best + 1]:
            if size > 0:
                live[serial] = size
            else:
                live.pop(serial, None)
        found: Counter[str] = Counter()
        for serial, size in live.items():
            found[self.sites[serial]] += size
        return found


def _site() -> str:
    names, frame = [], sys._getframe(2)
    while frame is not None and len(names) < DEPTH:
        path = frame.f_code.co_filename
        if "lightning_par/" in path and "planner/" not in path or "tests/helpers/models" in path:
            names.append(f"{path.rpartition('lightning_par/')[2].rpartition('tests/')[2]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)


class _Peak(Callback):
    """In the second batch of the second window, up to the optimizer's step."""

    def __init__(self, where: bool) -> None:
        self.where = where
        self.live: LiveBytes | None = None
        self.peak = 0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.live = _Located() if self.where else LiveBytes()
            self.live.__enter__()

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self.live is not None:
            self.peak = self.live.peak

    def on_train_batch_end(self, *args: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)


def run(
    case: str, layout: dict[str, Any], where: bool = False, precision: Any = "32-true"
) -> tuple[int, list[str]]:  # fmt: skip
    """The peak on this rank, and what lives then."""
    torch.manual_seed(0)
    model = MODELS[case]
    loader = DataLoader(model.data(0), batch_size=model.batch_size)  # type: ignore[arg-type]
    return trained(model.module(), loader, layout, where, precision)


def trained(
    module: Any, loader: Any, layout: dict[str, Any], where: bool = False, precision: Any = "32-true"
) -> tuple[int, list[str]]:  # fmt: skip
    """The peak on this rank as it trains ``module`` on four batches, and what lives then."""
    peak = _Peak(where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=ranks_of(layout), strategy=HybridParallelStrategy(**layout), max_steps=2,
            accumulate_grad_batches=2, callbacks=[peak], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, precision=precision,
        )  # fmt: skip
        trainer.fit(module, loader)
    places = peak.live.at_peak() if isinstance(peak.live, _Located) else Counter[str]()
    return peak.peak, [f"{size:>10,} {site}" for site, size in places.most_common()]


def planned(case: str, layout: dict[str, Any], precision: str = "32-true") -> list[float]:
    """What the planner says of each rank."""
    return said(MODELS[case].module, batch_of(case), layout, precision)


def said(module: Any, batch: Any, layout: dict[str, Any], precision: str = "32-true") -> list[float]:
    """What the planner says of each rank that trains ``module`` on batches like ``batch``."""
    machine = replace(read_machine("8xH100")[0], gpu=False)
    planner = Planner(module, batch, machine, precision, fused=False)
    window = 2 * layout.get("data_parallel_size", 1) * planner.step.samples
    one = planner.evaluate(layout, ranks_of(layout), window)
    places = product(*map(range, one.candidate.layout.sizes))
    return [one.beside(tensor, sequence)[pipeline].live for _, pipeline, sequence, tensor in places]


def cells(models: list[str] | None, layouts: list[str] | None) -> Iterator[tuple[str, str]]:
    return ((case, name) for case in models or CASES for name in layouts or LAYOUTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--kept", type=Path)
    asked = parser.parse_args()
    known: dict[str, list[int]] = json.loads(asked.kept.read_text()) if asked.kept and asked.kept.exists() else {}
    pool, ratios = Pool(), []
    for case, name in cells(asked.model, asked.layout):
        layout, key = LAYOUTS[name], f"{case} {name}"
        try:
            if key not in known or asked.where:
                found = pool.run(ranks_of(layout), run, case, layout, asked.where)
                known[key] = [peak for peak, _ in found]
                if asked.kept:
                    asked.kept.write_text(json.dumps(known))
                for rank, (peak, lines) in enumerate(found):
                    if asked.where:
                        print(f"{key}: rank {rank}: {peak:,}", *lines[:40], sep="\n    ", flush=True)
            plan = planned(case, layout)
        except (RuntimeError, ValueError) as error:
            print(f"{key}: not run: {str(error).strip().splitlines()[-1][:120]}", flush=True)
            continue
        off = [one / real - 1 for one, real in zip(plan, known[key], strict=True)]
        ratios += off
        ranks = ", ".join(f"{one:,.0f} / {real:,} = {one / real:.3f}" for one, real in zip(plan, known[key]))
        print(f"{'    ' if max(map(abs, off)) <= WITHIN else 'off '}{key}: {ranks}", flush=True)
    pool.close()
    off = [abs(x) for x in ratios]
    within = f"{sum(x <= WITHIN for x in off)} of {len(off)} ranks within {WITHIN:.0%}"
    print(f"off by {median(off):.1%} in the median, {max(off):.1%} at worst; {within}")


if __name__ == "__main__":
    from tests.planner.peaks import main as run_main  # so that ranks know its functions by a module's name

    run_main()
