"""Activation peaks of real runs, by the bytes of live tensors, against the planner's:
``python -m tests.planner.live_peak``.

Counted are the tensors that a rank makes in a forward and backward while gradients are there already, as in the second
batch of an accumulation window.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, default_collate

from lightning_par import HybridParallelStrategy
from lightning_par.planner.evaluate import Planner
from lightning_par.planner.machines import read_machine
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.planner.counted import CASES, LAYOUTS, ranks_of


class _Peak(Callback):
    """In the second batch of the second window, up to the end of backward."""

    def __init__(self) -> None:
        self.peak = 0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.live = LiveBytes() if batch_idx == 3 else None
        if self.live is not None:
            self.live.__enter__()

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        if self.live is not None:
            self.peak = self.live.peak

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)


def run(case: str, layout: dict[str, Any]) -> int:
    """The peak on this rank."""
    torch.manual_seed(0)
    model, peak = MODELS[case], _Peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=ranks_of(layout), strategy=HybridParallelStrategy(**layout), max_steps=2,
            accumulate_grad_batches=2, callbacks=[peak], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model.module(), DataLoader(model.data(0), batch_size=model.batch_size))  # type: ignore[arg-type]
    return peak.peak


def planned(case: str, layout: dict[str, Any]) -> list[float]:
    """What the planner says of each rank along the pipeline."""
    model = MODELS[case]
    machine, _ = read_machine("8xH100")
    planner = Planner(model.module, default_collate(model.data(0)[: model.batch_size]), machine, fused=False)
    return [rank.activations for rank in planner.evaluate(layout, ranks_of(layout)).stages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    asked = parser.parse_args()
    pool, ratios = Pool(), []
    for case in asked.model or CASES:
        for name in asked.layout or LAYOUTS:
            layout = LAYOUTS[name]
            try:
                counted, said = pool.run(ranks_of(layout), run, case, layout), planned(case, layout)
            except (RuntimeError, ValueError) as error:
                print(f"{case} {name}: not run: {str(error).strip().splitlines()[-1][:120]}", flush=True)
                continue
            each = len(counted) // len(said)
            found = [said[i // each % len(said)] / x for i, x in enumerate(counted)]
            ratios += found
            print(f"{case} {name}: {', '.join(f'{x:.3f}' for x in found)} of {counted[0]:,}", flush=True)
    pool.close()
    off = [abs(x - 1) for x in ratios]
    within = f"{sum(x < 0.05 for x in off)} of {len(off)} within 5 %"
    print(f"off by {median(off):.1%} in the median, {max(off):.1%} at worst; {within}")


if __name__ == "__main__":
    from tests.planner.live_peak import main as run_main  # so that ranks know its functions by a module's name

    run_main()
