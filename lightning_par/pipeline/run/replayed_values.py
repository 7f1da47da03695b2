"""The values of the model while a stage is run by its tape: what events make of them, and what units are given."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from lightning_par.pipeline.effects.random_draws import Draws
from lightning_par.pipeline.program.microbatch_values import local_shape, own_samples
from lightning_par.pipeline.program.program import Key, StepEvent
from lightning_par.pipeline.program.tape import Absent, Call, filled
from lightning_par.pipeline.run.arrived import Arrived
from lightning_par.pipeline.run.local_events import Given, facts_of, noted
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.run.taped_stage import TapedStage
from lightning_par.sharded.local_calls.repeated_calls import is_unwatched, surroundings
from lightning_par.sharded.tensor import ShardedTensor

_NO_KEY: Key = (-2, 0)


class ReplayedValues:
    """The values of the model in one run, as the step sees them, and as units do.

    Args:
        run: whose.
        stage: that it runs.
    """

    def __init__(self, run: StageRun, stage: TapedStage) -> None:
        self.run, self.program, self.shapes, self.told = run, run.program, run.program.shapes, stage.given
        self._detached: dict[Key, Tensor] = {}
        self.plain: dict[Key, Tensor] = {}  # of this microbatch alone, where `run.got` has none yet
        assert run.axis is not None
        self.axis, self.rank = run.axis, run.axis.rank
        self.alone = run.tokens.axis is None  # whether units are given no more than that
        self.strides: dict[Key, Any] = {}  # on one device, of those whose part does not tell them
        self.unwatched = self.alone and bool(stage.given) and is_unwatched()
        self.around: Any = None  # see `surroundings`
        receive = run.receive
        assert isinstance(receive, Arrived)
        for key, _ in run.program.routes.coming[run.stage]:
            if self.alone and isinstance(run.program.values[key], ShardedTensor):
                self.plain[key] = receive.own(key)  # units take no more: as the step sees it, it is made if asked
            else:
                run.got[key] = receive(key)

    def get(self, key: Key) -> Tensor:
        """As the step sees it."""
        found = self.run.got.get(key)
        if found is None:
            crossing = self.program.values.get(key)  # its event may return others, too
            model: Any = self.program.events[key[0]].result if crossing is None else crossing
            found = self.run.got[key] = ShardedTensor(self.plain[key], model.sharded_dim, model.positions, self.axis)
            found._strides = self.strides.get(key)
        return found

    def detached(self, key: Key) -> Tensor:
        """Without its graph, which would keep the microbatch's activations until the end of the step."""
        if key not in self._detached:
            self._detached[key] = self.get(key).detach()
        return self._detached[key]

    def _shape(self, index: int, model: ShardedTensor) -> tuple[int, ...]:
        found = self.shapes[index, self.rank] = local_shape(model, self.axis)
        return found

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
        key = index, self.rank, self.around, told.settings, facts
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
        args, kwargs = self._given(record, call)
        run.ran.append(call.func)
        assert call.original is not None
        if draws is not None:
            draws.stand_at(index)
            result = call.original(*args, **kwargs)
        else:
            with run.draws.of(index, call.module):
                result = call.original(*args, **kwargs)
        model = record.result
        if self.alone and not record.viewed and type(model) is ShardedTensor and type(result) is Tensor:
            shape = self.shapes.get((index, self.rank))
            if result.shape == (self._shape(index, model) if shape is None else shape):
                self.plain[index, 0] = result
                return
        run.made(index, run.as_recorded(call.func, result, record), record)

    def _given(self, record: StepEvent, call: Call) -> tuple[Any, dict[str, Any]]:
        told = call.kwargs
        if self.alone and not record.viewed and not call.nested:
            plain, given = self.plain, []
            for x in call.args:  # nothing is called for what is plain: this runs for each unit
                part = plain.get(x.key) if type(x) is Absent else None
                given.append(self._plain(x) if part is None else part)
            return given, {key: self._plain(x) for key, x in told.items()} if told else told
        args, kwargs = filled(call.args, self.get), filled(told, self.get)
        return self.run.all_taken(args, record.viewed), self.run.all_taken(kwargs, record.viewed)

    def _plain(self, x: Any) -> Any:
        if type(x) is Absent:
            return self.run.taken(self.get(x.key), False)
        if not isinstance(x, Tensor):
            return x
        layout = self.program.layouts.get(self.run.memo.keys.get(id(x), _NO_KEY))
        return x if layout is None else own_samples(x, layout, self.axis)
