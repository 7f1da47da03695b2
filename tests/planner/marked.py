"""The marked layout against all measured ones on CPU ranks: ``python -m tests.planner.marked --help``.

Each model is planned for the machine at hand, as ``--machine measure`` finds it; then each layout of the plan is really
trained, in turns, and the median of its steps compared with the fastest's.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_par import HybridParallelStrategy
from lightning_par.planner import plan
from lightning_par.planner.prediction import Prediction
from lightning_par.planner.report import named
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.planner.models import GPT, Llama

BAR = 1.1
"""Times the fastest: as slow may the marked one be."""

WARM = 3
"""Steps that are not counted."""


@dataclass(frozen=True)
class Case:
    """A model, its samples, and how many of them one device has in a step."""

    module: Callable[[], Any]
    data: Callable[[], Any]
    batch: int


def _tokens(count: int, length: int, vocab: int) -> Dataset[Any]:
    made = torch.randint(vocab, (count, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(made[:, :-1], made[:, 1:])


def _of_suite(name: str) -> Case:
    made = MODELS[name]
    return Case(made.module, lambda: made.data(0), made.batch_size)


CASES = {
    "gpt": Case(lambda: GPT(4, 128, 4, 512, 512, 64), lambda: _tokens(64, 64, 512), 8),
    "llama": Case(lambda: Llama(2, 256, 8, 4, 704, 1024, 128), lambda: _tokens(64, 128, 1024), 4),
    "gpt_wide": Case(lambda: GPT(2, 512, 8, 2048, 8192, 32), lambda: _tokens(64, 32, 8192), 1),
    "mlp_deep": _of_suite("mlp_deep"),
    "hf_bert": _of_suite("hf_bert"),
}


class _Clock(Callback):
    """When each step of the optimizer begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.times.append(time.perf_counter())


class _Again(Dataset[Any]):
    """The samples of another one, over and over."""

    def __init__(self, data: Any, count: int) -> None:
        self.data, self.count = data, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def train(case: str, arguments: dict[str, Any], batch: int, accumulate: int, steps: int) -> list[float]:
    """Seconds of each step of the optimizer, on this rank."""
    torch.manual_seed(0)
    clock, made = _Clock(), CASES[case]
    ranks = torch.tensor([v for k, v in arguments.items() if k.endswith("_size")]).prod().item()
    count = arguments["data_parallel_size"] * batch * accumulate * (steps + WARM + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = made.module()
        trainer = Trainer(
            accelerator="cpu", devices=int(ranks), strategy=HybridParallelStrategy(**arguments),
            max_steps=steps + WARM + 1, accumulate_grad_batches=accumulate, callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(_Again(made.data(), count), batch_size=batch))
    times = clock.times[WARM:]
    return [end - begin for begin, end in zip(times, times[1:])]


@dataclass(frozen=True)
class Outcome:
    """What became of a model's layouts: predicted and measured seconds of each that ran, the marked one's first."""

    names: tuple[str, ...]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The marked one's time over the fastest's."""
        return self.measured[0] / min(self.measured)


def compare(
    pool: Pool, case: str, machine: str, ranks: int, most: int, rounds: int, steps: int, shown: bool = True
) -> Outcome:
    """Plan ``case`` and train its layouts in turns."""
    made = CASES[case]
    batch = next(iter(DataLoader(made.data(), batch_size=made.batch)))
    found = plan(made.module, batch, machine, devices=ranks)
    assert found.chosen is not None
    layouts = [found.layouts[found.chosen]]
    layouts += [one for i, one in enumerate(found.layouts) if i != found.chosen and one.fits]
    layouts = layouts[:most]
    times: dict[int, list[float]] = defaultdict(list)
    refused: dict[int, str] = {}
    for _ in range(rounds):
        for number, one in enumerate(layouts):
            if number not in refused:
                try:
                    times[number] += _timed(pool, case, one, ranks, steps)
                except RuntimeError as error:
                    refused[number] = str(error).strip().splitlines()[-1][:160]
    ran = [i for i in range(len(layouts)) if i not in refused]
    outcome = Outcome(
        tuple(named(layouts[i]) for i in ran), tuple(layouts[i].seconds for i in ran),
        tuple(median(times[i]) for i in ran),
    )  # fmt: skip
    if shown:
        _show(case, outcome, [f"{named(layouts[i])}: not run: {why}" for i, why in refused.items()])
    return outcome


def _timed(pool: Pool, case: str, one: Prediction, ranks: int, steps: int) -> list[float]:
    c = one.candidate
    each = round(c.micro * c.microbatches)
    return list(pool.run(ranks, train, case, c.arguments(), each, c.accumulated, steps, timeout=120)[0])


def _show(case: str, found: Outcome, refused: Sequence[str]) -> None:
    best = min(found.measured)
    print(f"{case}: the marked one takes {found.ratio:.2f} of the fastest's time")
    for name, said, real in zip(found.names, found.predicted, found.measured):
        print(f"   {name:75} predicted {said * 1e3:8.2f} ms  measured {real * 1e3:8.2f} ms  {real / best:5.2f}")
    print(*(f"   {line}" for line in refused), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--machine", default="measure", help="as the command plan takes it (default: measure)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--most", type=int, default=24, help="layouts of each model (default: 24)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is trained (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="that are counted each time (default: 8)")
    asked = parser.parse_args()
    pool, ratios = Pool(), {}
    for case in asked.model or CASES:
        ratios[case] = compare(pool, case, asked.machine, asked.ranks, asked.most, asked.rounds, asked.steps).ratio
    pool.close()
    within = sum(ratio <= BAR for ratio in ratios.values())
    print(f"{within} of {len(ratios)} within {BAR - 1:.0%}: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))


if __name__ == "__main__":
    from tests.planner.marked import main as run_main  # so that ranks know its functions by a module's name

    run_main()
