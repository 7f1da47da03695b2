"""Stages run by the tape of the step's dry run, without the user's step: its events alone, on each microbatch.

That is the same where the step's own code does nothing but make events, which the tape shows, and where what units
reach is as the dry run left it. Units may still be other than they seemed: where a run changed what the step watches,
it is undone and the step is run as ever, from then on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from lightning_par.pipeline.effects.console import Hearing, Said, hushed, say
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.random_draws import stand_at
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.program.prepared_step import Part, Prepared
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.tape import Tape, filled
from lightning_par.pipeline.run.alike_microbatches import AlikeMicrobatches
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.run.replayed_values import ReplayedValues
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.run.taped_stage import TapedStage, stage_of


class Replays:
    """Runs stages of a step by its tape, where that fits.

    Args:
        module: the LightningModule.
        watch: its Python state.

    Attributes:
        count: of the runs so far.
        alone: whether units talk to no other rank, so that this one may run a stage again.
        alike: tells whether a step's later microbatches do as its first one does.
    """

    def __init__(self, module: nn.Module, watch: Watch) -> None:
        self.module, self.watch = module, watch
        self.count = 0
        self.alone, self.alike = False, AlikeMicrobatches()
        self._unfit: list[Program] = []  # whose units changed what is watched
        self._tape: Tape | None = None
        self._stages: dict[int, TapedStage] = {}
        self._looked: set[int] = set()  # stages that have run once
        self._looking = False  # whether the watched state is looked at
        self._said = _Said()
        self._printed: list[Said] = []  # by the run that is on, which may not count
        self._listening: list[contextlib.AbstractContextManager[None]] = []  # around units

    def begin(self, ready: Prepared, apart: bool) -> None:
        """A step begins; ``apart`` if something beside its events counts, as hooks do."""
        unfit = apart or ready.coupled or ready.program in self._unfit
        self._tape = None if unfit else ready.parts[0].tape
        self.alike.begin(None if self._tape is None or len(ready.parts) == 1 else self._tape.program)
        self._stages, self._looked, self._looking = {}, set(), False

    def pause(self) -> None:
        """A run of the user's step follows, or none: what changes from now on stays."""
        if self._looking:
            self.watch.let_go()
        self._looking = False

    def end(self) -> None:
        """All forwards have run, and all backwards, unless these meet what the step did."""
        if self._looking:
            self.alike.end(self.watch.moves)
        self.pause()
        self._tape, self._stages = None, {}  # they hold the batch

    def run(self, part: Part, run: StageRun, counts: bool) -> tuple[Any, Effects] | None:
        """What the stage's run yields, and did where it ``counts``; None where the user's step must run."""
        tape = self._tape
        stage = None if tape is None or part.tape is not tape else self._stage(tape, run)
        if tape is None or stage is None or not stage.fits or counts and tape.logs is None:
            self.pause()
            return None
        first = run.stage not in self._looked
        if not first and self.alike.trusted and not self._seeds(stage, run):
            self.count += 1
            return self._run(tape, stage, part, run, counts, first)
        if first:
            stand_at(part.before)
        self._look()
        self._said.any = False
        listening, hushes, hears = self._listening
        hushes = hushes if run.axis is not None and run.axis.rank else hears
        try:
            with listening, hushes:
                found = self._run(tape, stage, part, run, counts, first)
        except BaseException:
            self._say()
            self._looking = False
            self.watch.put_back()
            raise
        if first:
            run.checked = 0
            run.finish()  # looks at global generators
        if self.watch.moves() or self._said.any:
            self._undo()
            _put_back(stage, first)
            run.begin_anew()
            return None
        if found is None:
            self._printed.clear()
            run.begin_anew()
            return self.run(part, run, counts)
        self._say()
        self._looked.add(run.stage)
        self.count += 1
        return found

    def _stage(self, tape: Tape, run: StageRun) -> TapedStage | None:
        if run.stage >= run.program.stages:
            return None
        if run.stage not in self._stages:
            self._stages[run.stage] = stage_of(tape, run)
        return self._stages[run.stage]

    def _seeds(self, stage: TapedStage, run: StageRun) -> bool:
        """Whether units get streams to draw from: they may draw, or it is too late once they have."""
        return not self.alone or stage.draws or run.stage in run.program.drawing

    def _look(self) -> None:
        """What the run that follows changes can be undone; what others have changed since the last one stays."""
        if self._looking and self.watch.moves():  # a backward of the user's, say
            self.alike.stray()
            self.watch.let_go()
            self._looking = False
        if not self._looking:
            self.watch.look()
            hears = Hearing(self._printed.append)
            self._looking, self._listening = True, [self.watch.listening(self._said), hushed(), hears]

    def _say(self) -> None:
        """What was printed in a run that counts is printed."""
        for said in self._printed:
            say(said, self.module)
        self._printed.clear()

    def _undo(self) -> None:
        assert self._tape is not None
        self.alike.stray()
        self._unfit.append(self._tape.program)
        self._tape, self._looking = None, False
        self._printed.clear()
        self.watch.put_back()

    def _run(
        self, tape: Tape, stage: TapedStage, part: Part, run: StageRun, counts: bool, first: bool
    ) -> tuple[Any, Effects] | None:
        """See `run`; None where units have drawn that were not known to, and had no streams to draw from.

        Where they have kept something, too, that can't be put back, what they drew stands: they would keep it twice.
        """
        effects, result = Effects(), None
        seeds = self._seeds(stage, run)
        run.depth = 1
        before, Run.current = Run.current, run
        try:
            with torch.set_grad_enabled(part.step.grad), part.step.context():
                values = ReplayedValues(run, stage)
                looks = first or not self.alike.draws_trusted
                with run.draws.several(seeds, looks) if stage.trains else _NOTHING as draws:
                    for index, record, call in stage.calls:
                        if call.original is None:
                            values.event(index, record, call)
                        else:
                            values.unit(index, record, call, draws)
                if draws is not None and draws.drew:
                    run.program.drawing.add(run.stage)
                    if _put_back(stage, first):
                        return None
                values.finish()
                if run.last:
                    result = filled(tape.result, values.get)
                if counts and tape.logs is not None:
                    effects.logs = [
                        type(x)(x.name, filled(x.value, values.detached), x.args, x.kwargs) for x in tape.logs
                    ]
                    effects.result = filled(tape.result, values.detached)
        finally:
            Run.current, run.depth = before, 0
        return result, effects


def _put_back(stage: TapedStage, first: bool) -> bool:
    """Undo what units of a stage have kept that has run, where all of it can be; whether that is so.

    Args:
        stage: that has run.
        first: whether for the first time in this step.
    """
    if not all(call.may_be_put_back(first) for *_, call in stage.calls):
        return False
    for *_, call in stage.calls:
        call.put_back()
    return True


_NOTHING = contextlib.nullcontext()


class _Said:
    """Hears whether anything is said."""

    any = False

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.any = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.any = True

    def hear(self, said: Any) -> None:
        self.any = True
