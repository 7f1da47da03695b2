"""Stages run by the tape of the step's dry run, without the user's step: its events alone, on each microbatch.

That is the same where the step's own code does nothing but make events, which the tape shows, and where what units
reach is as the dry run left it. Units may still be other than they seemed: where a run changed what the step watches,
it is undone and the step is run as ever, from then on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.console import hushed
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.random_draws import Draws, drawing, stand_at
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.program.microbatch_values import local_shape, own_samples
from lightning_par.pipeline.program.prepare import Part, Prepared
from lightning_par.pipeline.program.program import Key, Program, StepEvent
from lightning_par.pipeline.program.tape import Absent, Call, Tape, filled, keys_in
from lightning_par.pipeline.run.local_events import Given, facts_of, given_to, noted
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.python_state.nested_tensors import returned_tensors
from lightning_par.sharded.local_calls.repeated_calls import is_unwatched, surroundings
from lightning_par.sharded.tensor import ShardedTensor


@dataclass
class _Stage:
    """The calls of a stage, or why there are none."""

    calls: list[tuple[int, StepEvent, Call]] = field(default_factory=list)
    fits: bool = True
    trains: bool = False  # whether all units do
    shapes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # by event and samples
    given: dict[int, Given | None] = field(default_factory=dict)  # to events that are no units


class Replays:
    """Runs stages of a step by its tape, where that fits.

    Args:
        module: the LightningModule.
        watch: its Python state.

    Attributes:
        count: of the runs so far.
    """

    def __init__(self, module: nn.Module, watch: Watch) -> None:
        self.module, self.watch = module, watch
        self.count = 0
        self._unfit: list[Program] = []  # whose units changed what is watched
        self._tape: Tape | None = None
        self._stages: dict[int, _Stage] = {}
        self._looked: set[int] = set()  # stages that have run once
        self._looking = False  # whether the watched state is looked at

    def begin(self, ready: Prepared, apart: bool) -> None:
        """A step begins; ``apart`` if something beside its events counts, as hooks do."""
        unfit = apart or ready.coupled or ready.program in self._unfit
        self._tape = None if unfit else ready.parts[0].tape
        self._stages, self._looked, self._looking = {}, set(), False

    def pause(self) -> None:
        """A run of the user's step follows, or none: what changes from now on stays."""
        if self._looking:
            self.watch.let_go()
        self._looking = False

    def end(self) -> None:
        """All forwards have run."""
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
        if first:
            stand_at(part.before)
        self._look()
        said = _Said()
        try:
            with self.watch.listening(said), hushed() if run.axis is not None and run.axis.rank else _NOTHING:
                found = self._run(tape, stage, part, run, counts)
        except BaseException:
            self._looking = False
            self.watch.put_back()
            raise
        if first:
            run.checked = 0
            run.finish()  # looks at global generators
        if self.watch.moves() or counts and said.any:
            self._undo()
            run.begin_anew()
            return None
        self._looked.add(run.stage)
        self.count += 1
        return found

    def _stage(self, tape: Tape, run: StageRun) -> _Stage | None:
        if run.stage >= run.program.stages:
            return None
        if run.stage not in self._stages:
            self._stages[run.stage] = _stage_of(tape, run)
        return self._stages[run.stage]

    def _look(self) -> None:
        """What the run that follows changes can be undone; what others have changed since the last one stays."""
        if self._looking and self.watch.moves():  # a backward of the user's, say
            self.watch.let_go()
            self._looking = False
        if not self._looking:
            self.watch.look()
            self._looking = True

    def _undo(self) -> None:
        assert self._tape is not None
        self._unfit.append(self._tape.program)
        self._tape, self._looking = None, False
        self.watch.put_back()

    def _run(self, tape: Tape, stage: _Stage, part: Part, run: StageRun, counts: bool) -> tuple[Any, Effects]:
        effects, result = Effects(), None
        run.depth = 1
        before, Run.current = Run.current, run
        try:
            with torch.set_grad_enabled(part.step.grad), part.step.context():
                values = _Values(run, stage)
                with Draws(run.draws) if stage.trains else _NOTHING as draws:
                    for index, record, call in stage.calls:
                        if call.original is None:
                            values.event(index, record, call)
                        else:
                            values.unit(index, record, call, draws)
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


_NOTHING = contextlib.nullcontext()
_NO_KEY: Key = (-2, 0)


class _Said:
    """Hears whether anything is said."""

    any = False

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.any = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.any = True

    def hear(self, said: Any) -> None:
        self.any = True


class _Values:
    """The values of the model in one run, as the step sees them, and as units do.

    Args:
        run: whose.
        stage: that it runs.
    """

    def __init__(self, run: StageRun, stage: _Stage) -> None:
        self.run, self.program, self.shapes, self.told = run, run.program, stage.shapes, stage.given
        self._detached: dict[Key, Tensor] = {}
        self.plain: dict[Key, Tensor] = {}  # of this microbatch alone, where `run.got` has none yet
        assert run.axis is not None
        self.axis = run.axis
        self.alone = run.tokens.axis is None  # whether units are given no more than that
        self.strides: dict[Key, Any] = {}  # on one device, of those whose part does not tell them
        self.unwatched = self.alone and bool(stage.given) and is_unwatched()
        self.around: Any = None  # see `surroundings`
        for key, _ in run.program.routes.coming[run.stage]:
            run.got[key] = x = run.receive(key)
            if self.alone and type(x) is ShardedTensor and x._axis is self.axis and x._strides is None:
                self.plain[key] = x._local

    def get(self, key: Key) -> Tensor:
        """As the step sees it."""
        found = self.run.got.get(key)
        if found is None:
            model = self.program.events[key[0]].result
            found = self.run.got[key] = ShardedTensor(self.plain[key], model.sharded_dim, model.positions, self.axis)
            found._strides = self.strides.get(key)
        return found

    def detached(self, key: Key) -> Tensor:
        """Without its graph, which would keep the microbatch's activations until the end of the step."""
        if key not in self._detached:
            self._detached[key] = self.get(key).detach()
        return self._detached[key]

    def _shape(self, index: int, model: ShardedTensor) -> tuple[int, ...]:
        key = index, model.positions.count(self.axis.rank)
        if key not in self.shapes:
            self.shapes[key] = local_shape(model, self.axis)
        return self.shapes[key]

    def finish(self) -> None:
        """What leaves the stage is there."""
        for key, x in self.plain.items():
            self.run.got.setdefault(key, x)

    def event(self, index: int, record: StepEvent, call: Call) -> None:
        told = self.told[index] if self.unwatched else None
        parts = None if told is None else self._parts(told)
        if told is None or parts is None:
            self._as_ever(index, call)
            return
        given, facts = parts
        if self.around is None:
            self.around = surroundings(given[0])
        key = index, self.axis.rank, self.around, told.settings, facts
        known = self.program.local_events.get(key, False)
        if known is False or known is None:  # what comes once is not worth noting
            self._as_ever(index, call)
            if known is False:
                self.program.local_events[key] = True
        elif known is True:
            ever = partial(self._as_ever, index, call)
            self.program.local_events[key] = noted(self.run, index, record, ever, given)
        elif known.sharded:
            self.plain[index, 0] = known.run(*given)
            if known.strides is not None:
                self.strides[index, 0] = known.strides
        else:
            self.run.got[index, 0] = known.run(*given)

    def _parts(self, told: Given) -> tuple[list[Tensor], tuple[Any, ...]] | None:
        """The tensors that an event is given, of samples the microbatch's own, and what its rule may go by of them."""
        given: list[Tensor] = []
        facts: list[Any] = []
        for x in told.places:
            if isinstance(x, Tensor):
                part = x
            elif x in self.plain:
                part = self.plain[x]
                facts.append(self.strides.get(x))
            else:
                part = self.run.got[x]
                if type(part) is not Tensor:
                    return None
            facts += facts_of(part)
            facts += [number for number, other in enumerate(given) if other is part]  # a rule may go by that
            given.append(part)
        return given, tuple(facts)

    def _as_ever(self, index: int, call: Call) -> None:
        run = self.run
        run.count = index
        if call.nested:
            args, kwargs = filled(call.args, self.get), filled(call.kwargs, self.get)
        else:
            args = tuple([self.get(x.key) if type(x) is Absent else x for x in call.args])
            kwargs = {key: filled(x, self.get) for key, x in call.kwargs.items()}
        run.event(call.func, args, kwargs)

    def unit(self, index: int, record: StepEvent, call: Call, draws: Draws | None) -> None:
        run = self.run
        args, kwargs = self._given(call.args, record, call), self._given(call.kwargs, record, call)
        run.ran.append(call.func)
        assert call.original is not None
        if draws is not None:
            draws.stand_at(index)
            result = call.original(*args, **kwargs)
        else:
            with drawing((*run.draws, index), call.module):
                result = call.original(*args, **kwargs)
        model = record.result
        if self.alone and not record.viewed and type(model) is ShardedTensor and type(result) is Tensor:
            if result.shape == self._shape(index, model):
                self.plain[index, 0] = result
                return
        run._made(index, run._as_recorded(call.func, result, record), record)

    def _given(self, told: Any, record: StepEvent, call: Call) -> Any:
        if self.alone and not record.viewed and not call.nested:
            if type(told) is dict:
                return {key: self._plain(x, record) for key, x in told.items()}
            return [self._plain(x, record) for x in told]
        return self.run._taken(filled(told, self.get), record.viewed)

    def _plain(self, x: Any, record: StepEvent) -> Any:
        if type(x) is Absent:
            found = self.plain.get(x.key)
            return self.run.taken(self.get(x.key), False) if found is None else found
        if not isinstance(x, Tensor):
            return x
        layout = self.program.layouts.get(self.run.memo.keys.get(id(x), _NO_KEY))
        return x if layout is None else own_samples(x, layout, self.axis)


def _stage_of(tape: Tape, run: StageRun) -> _Stage:
    """The calls that make up a stage, if its tape tells them all and units are as they were when it was made."""
    program, stage = run.program, _Stage()
    known = {key for key, _ in program.routes.coming[run.stage]}
    for index in range(run.first, min(run.end, len(program.events))):
        record, call = program.events[index], tape.calls.get(index)
        if index in tape.unlike:
            return _Stage(fits=False)
        if call is not None:
            if not known.issuperset(keys_in((call.args, call.kwargs))) or not call.is_as_it_was():
                return _Stage(fits=False)
            known.update((index, n) for n in range(len(returned_tensors(record.result))))
            stage.calls.append((index, record, call))
            if call.original is None:
                stage.given[index] = given_to(record, call, run.memo)
    if run.last and not known.issuperset(keys_in((tape.result, [x.value for x in tape.logs or ()]))):
        return _Stage(fits=False)
    stage.trains = all(call.module.training for *_, call in stage.calls if call.module is not None)
    return stage
