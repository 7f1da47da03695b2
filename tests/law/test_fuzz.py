"""The fuzzer itself, and a small sample of it; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tests.fuzz.__main__ import GOOD, Session, layouts_of
from tests.fuzz.grammar import generate
from tests.fuzz.judging import Judge, Outcome
from tests.fuzz.layouts import LAYOUTS, names_of
from tests.fuzz.program import Program
from tests.fuzz.shrinking import shrink
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

SAMPLE = (2, 7)


def test_a_seed_repeats_its_program() -> None:
    sources = [generate(seed).source() for seed in range(40)]
    assert sources == [generate(seed).source() for seed in range(40)]
    assert len(set(sources)) == 40
    for source in sources:
        compile(source, "program", "exec")


def test_every_smaller_program_is_one() -> None:
    for seed in range(20):
        program = generate(seed)
        for smaller in program.smaller():
            compile(smaller.source(), "program", "exec")
            assert smaller != program


def test_what_a_finding_does_not_need_is_taken_away() -> None:
    program = next(p for p in map(generate, range(1000)) if {"batch_mean", "mlp"} <= set(p.names))
    small = shrink(program, lambda p: "batch_mean" in p.names)
    assert set(small.names) <= {small.stem.piece.name, "batch_mean", small.head.piece.name, "ce", "mse", "sgd"}
    assert not small.options and small.epochs == 1


def test_each_program_is_tried_under_layouts_that_fit_it() -> None:
    for seed in range(50):
        program = generate(seed)
        names = layouts_of(program, names_of(["all"]), 2)
        assert names == layouts_of(program, names_of(["all"]), 2)
        assert len({LAYOUTS[name].family for name in names}) == 2


_WRONG = """
import torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lin, self.seen = nn.Linear(4, 4), []

    def training_step(self, batch, batch_idx):
        {line}
        return self.lin(batch).pow(2).mean() * scale

    def predict_step(self, batch):
        return self.lin(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def loader(seed):
    return DataLoader(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)), batch_size=2)

def options():
    return dict(max_epochs=1)
"""


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("scale = 1.0", "equal"),
        ("scale = 1.0 + 1e-6 * (self.trainer.world_size > 1)", "wrong"),
        ("scale = 1.0; self.seen.append(self.trainer.world_size)", "wrong"),
        ("scale = 1.0; 1 / (self.trainer.world_size - 2)", "crash"),
        ("scale = {}['missing']", "invalid"),
    ],
)
def test_what_comes_of_a_program(pool: Pool, line: str, kind: str) -> None:
    assert Judge(pool).judge(_WRONG.format(line=line), "data").kind == kind


def test_a_sample(pool: Pool) -> None:
    for program, layout, outcome in _outcomes(Judge(pool), SAMPLE, 1):
        assert outcome.kind in GOOD, (program.seed, layout, outcome)


@slow()
@pytest.mark.timeout(4000)
def test_an_hour(pool: Pool, tmp_path: Path) -> None:
    asked = Namespace(
        seed=10_000, count=None, minutes=60.0, strategies=["all"], layouts_each=2, folder=tmp_path, no_shrink=True,
        without=[],
    )  # fmt: skip
    session = Session(Judge(pool), asked)
    session.run()
    assert not session.bad, session.messages


def _outcomes(judge: Judge, seeds: tuple[int, ...], count: int) -> list[tuple[Program, str, Outcome]]:
    found = []
    for program in map(generate, seeds):
        source = program.source()
        for layout in layouts_of(program, names_of(["all"]), count):
            found.append((program, layout, judge.judge(source, layout, program.draws)))
    return found
