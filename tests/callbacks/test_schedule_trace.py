"""The picture of a recorded step: what ran is the schedule, on every rank, and waiting is no part of it."""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, ScheduleTrace, pl
from lightning_par.pipeline.plan.schedule import gives, make_schedule, needs
from lightning_par.pipeline.run import messages
from lightning_par.pipeline.simulate import Span, bubble, predicted_bubble, replay, simulate
from lightning_par.private.process_groups import default_store
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

MICROBATCHES = 4


class Clock:
    """A clock of this rank that goes on when it is told to, and when a message comes from a later time.

    It is in the store where ranks meet: whatever else a step changes is put back when a part of it has run.
    """

    messenger: Any = None

    @staticmethod
    def advance(by: int = 0) -> int:
        """What it shows then."""
        return int(default_store().add(f"clock of rank {dist.get_rank()}", by))


class Layer(nn.Module):
    """Takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if Clock.messenger is not None and Clock.messenger.timed:  # no trial of the step
            Clock.advance(1)
        return self.linear(x)


class Clocked(messages.Messenger):
    """Messages carry the time at which they were sent."""

    def __init__(self, axis: Any, device: torch.device) -> None:
        super().__init__(axis, device)
        Clock.messenger = self
        self.count: Counter[tuple[Any, ...]] = Counter()

    def clock(self) -> float:
        return Clock.advance()

    def exchange(self, sent: Any, received: Any) -> Any:
        for one in sent:
            self._store("sent", one.kind, self._axis.rank, one.to, one.tag)[0](str(Clock.advance()))
        told = [self._store("received", one.kind, one.source, self._axis.rank, one.tag)[1] for one in received]

        class Received(messages._Received):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.told = told.pop(0)

            def __call__(self) -> Tensor:
                x = super().__call__()
                Clock.advance(max(0, int(self.told()) - Clock.advance()))
                return x

        with mock.patch.object(messages, "_Received", Received):
            return super().exchange(sent, received)

    def _store(self, way: str, *message: Any) -> tuple[Any, Any]:
        """What keeps the time of the next message with this sign, and what gives it."""
        self.count[(way, *message)] += 1
        store, key = default_store(), f"{message} {self.count[(way, *message)]}"
        return partial(store.set, key), partial(store.get, key)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def training_step(self, batch: Tensor) -> Tensor:
        print("a step")
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit_by_clock(path: str, schedule: str) -> tuple[Span, ...]:
    with mock.patch("lightning_par.pipeline.run.engine.Messenger", Clocked):
        return _fit(path, schedule)[0]


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


@slow("1f1b")
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


@slow("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_waiting_is_no_part_of_an_action(pool: Pool, tmp_path: Path, schedule: str) -> None:
    spans, _ = pool.run(2, _fit_by_clock, str(tmp_path / "schedule.svg"), schedule)
    planned = make_schedule(schedule, ranks=2, microbatches=MICROBATCHES)
    layers = 4 / planned.stages
    expected = simulate(planned, {"F": layers, "B": 0, "I": 0, "W": 0})
    begin = min(span.start for span in spans)
    times = {(span.rank, span.action): (span.start - begin, span.end - begin) for span in spans}
    assert times == {(span.rank, span.action): (span.start, span.end) for span in expected}
    assert len({start for start, _ in times.values()}) > MICROBATCHES


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
