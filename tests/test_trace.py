"""The picture of a recorded step: what ran is the schedule, on every rank, and waiting is no part of it."""

from __future__ import annotations

import io
import re
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, ScheduleTrace, pl
from lightning_par.pipeline.schedule import gives, make_schedule, needs
from lightning_par.pipeline.simulate import Span, bubble, predicted_bubble, replay
from tests.pool import Pool

MICROBATCHES, NAP = 4, 0.03


class Slow(nn.Module):
    """Takes as long as anything can on a machine that is busy with other things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP)
        return self.linear(x)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Slow() for _ in range(4)))

    def training_step(self, batch: Tensor) -> Tensor:
        print("a step")
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(path: str, schedule: str, step: int = 1, devices: int = 2) -> tuple[tuple[Span, ...], list[str], list[str]]:
    trace = ScheduleTrace(path, step)
    strategy: Any = PipelineParallelStrategy(schedule=schedule, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=3, callbacks=trace, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
        warnings.simplefilter("always")
        trainer.fit(Net(), DataLoader(torch.randn(24, 8), batch_size=8))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(("a step", path))]
    return trace.spans, [str(w.message) for w in caught if "ScheduleTrace" in str(w.message)], lines


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_recorded_step_is_its_schedule_and_is_drawn(pool: Pool, tmp_path: Path, schedule: str) -> None:
    path = tmp_path / "schedule.svg"
    (spans, alarms, printed), (others, _, silence) = pool.run(2, _fit, str(path), schedule)
    assert others == () and not alarms
    assert [line for line in printed if line == "a step"] == ["a step"] * 3 and silence == []
    assert printed[2].startswith(f"{path}: {schedule} over 2 ranks, {MICROBATCHES} microbatches: ")
    assert printed[2].endswith(f" s, bubble {bubble(spans, 2):.1%}.")
    planned = make_schedule(schedule, ranks=2, microbatches=MICROBATCHES)
    for rank, actions in enumerate(planned.actions):
        mine = [span for span in spans if span.rank == rank]
        assert tuple(span.action for span in mine) == actions
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:]))
    begun = {gives(span.action): span.start for span in spans}
    for span in spans:  # one clock, whichever rank it was
        assert all(span.start > begun[value] for value in needs(span.action, planned.stages))
    order = [(span.rank, span.action.op, span.action.stage, span.action.microbatch) for span in spans]
    assert bubble(replay(order), 2) == pytest.approx(predicted_bubble(schedule, 2, MICROBATCHES))
    text = path.read_text()
    assert text.count("<title>") == len(spans) and "seconds" in text
    assert f"bubble {100 * bubble(spans, 2):.1f} %" in text


def test_waiting_is_no_part_of_an_action(pool: Pool, tmp_path: Path) -> None:
    (spans, *_), _ = pool.run(2, _fit, str(tmp_path / "schedule.svg"), "1f1b")
    first = {span.action.op: span.end - span.start for span in spans if span.rank == 1 and span.action.microbatch == 0}
    start = {span.rank: span.start for span in reversed(spans)}
    assert start[1] - start[0] > 1.5 * NAP  # rank 1 waits for the two layers of rank 0
    assert first["B"] < NAP  # naps are in forwards alone
    back = [span for span in spans if span.rank == 0 and span.action.op == "B"]
    assert back[0].end - back[0].start < NAP  # although rank 0 waited for rank 1's forward before it


def test_a_run_without_such_a_step_says_so(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    (spans, (alarm,), _), (_, none, _) = pool.run(2, _fit, str(path), "1f1b", 7)
    assert spans == () and none == [] and not path.exists()
    assert alarm == "ScheduleTrace drew nothing: the run ended before batch 7."
    ((spans, (alarm,), _),) = pool.run(1, _fit, str(path), "1f1b", 1, 1)
    assert alarm == "ScheduleTrace draws nothing: PipelineParallelStrategy runs no pipeline here."


def test_both_lightnings_have_it() -> None:
    import pytorch_lightning

    assert isinstance(pl.ScheduleTrace(), pytorch_lightning.Callback)
    with pytest.raises(ValueError, match=re.escape("counted from 0, got step=-1")):
        ScheduleTrace(step=-1)
