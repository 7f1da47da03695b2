"""Runs of a step whose program is known: without any stage's values, or as one stage on one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.draws import drawing
from lightning_par.pipeline.located import (
    ChangedError,
    ElsewhereError,
    Event,
    Key,
    Program,
    Run,
    StageDoneError,
)
from lightning_par.pipeline.microbatch import MicrobatchAxis
from lightning_par.pipeline.structure import map_tensors, tensors_in
from lightning_par.rules.table import user_line, writes
from lightning_par.view import ShardedTensor


class Memo:
    """What depends on the batch alone: computed once a step, the same objects in every run of it.

    But a function that writes into a tensor of the module's, or returns a view of one, runs in every run of the step:
    each has copies of the module's tensors.
    """

    def __init__(self, batch: Any) -> None:
        self.results: dict[int, Any] = {}
        self.keys: dict[int, Key] = {id(x): (-1, n) for n, x in enumerate(tensors_in(batch))}
        self.anew: dict[int, Tensor | None] = {}  # events that run every time: where they write, the generator before
        self._views: dict[int, Any] = {}  # of the module's tensors, by id
        self._copies: dict[int, Tensor] = {}

    def compute(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The first run's result."""
        before = torch.get_rng_state() if writes(getattr(func, "__name__", "")) else None
        result = func(*args, **kwargs)
        if not touches_state(func, args, kwargs, result, self.is_state):
            return self.keep(event, result)
        self.anew[event] = before
        return self._state(event, result)

    def again(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an event in a later run."""
        if event not in self.anew:
            return self.results[event] if event in self.results else self.keep(event, func(*args, **kwargs))
        before, now = self.anew[event], torch.get_rng_state()
        if before is not None:
            torch.set_rng_state(before)
        try:
            return self._state(event, func(*args, **kwargs))
        finally:
            if before is not None:
                torch.set_rng_state(now)

    def _state(self, event: int, result: Any) -> Any:
        for n, x in enumerate(tensors_in(result)):
            self._views[id(x)] = x
            self.keys[id(x)] = (event, n)
        return result

    def copied(self, x: Tensor) -> Tensor | None:
        """The one copy of a tensor of the batch alone, None of others."""
        return None if self.is_state(x) else self._copies.setdefault(id(x), x.detach().clone())

    def is_state(self, x: Tensor) -> bool:
        """Whether the module held it before the step, or it is a view of such a tensor."""
        return id(x) not in self.keys or id(x) in self._views

    def keep(self, event: int, result: Any) -> Any:
        self.results[event] = result
        self.keys.update((id(x), (event, n)) for n, x in enumerate(tensors_in(result)))
        return result


class DryRun(Run):
    """Computes what depends on the batch alone, and checks that the step does what was recorded of it.

    Raises:
        ChangedError: it does something else.
    """

    def __init__(self, program: Program, memo: Memo) -> None:
        super().__init__()
        self.program = program
        self.memo = memo
        self.names: dict[int, Key] = {}  # of absent tensors

    def _next(self, func: Any, args: Any, kwargs: Any) -> tuple[int, Event]:
        index, self.count = self.count, self.count + 1
        if index >= len(self.program.events) or self.program.events[index].func != func:
            raise ChangedError(f"{user_line()}: {func}")
        names = self.names
        inputs = tuple(names[id(x)] for x in tensors_in((args, kwargs)) if id(x) in names)
        record = self.program.events[index]
        if inputs != record.inputs:
            raise ChangedError(f"{user_line()}: the inputs of {func}")
        if record.kind == "located":
            names.update((id(x), (index, n)) for n, x in enumerate(tensors_in(record.result)))
        return index, record

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        index, record = self._next(func, args, kwargs)
        if record.kind == "batch":
            return self.memo.compute(index, func, args, kwargs)
        if record.writes:
            return written_into(self, args[0], record.result, func)
        return record.result

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._next(path, args, kwargs)[1].result

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._next(("metric", method), args, kwargs)[1].result

    def finish(self) -> None:
        if self.count != len(self.program.events):
            raise ChangedError("the step ended early")


class StageRun(Run):
    """One stage of the step, on one microbatch; or the tail, on the whole batch.

    Args:
        program: of the step.
        memo: of the batch.
        stage: which stage; ``program.stages`` for the tail.
        axis: the microbatch, None where the batch is not cut.
        receive: gives a value that comes from the stage before.
        tells: whether what the step does to metrics counts.
        key: of the random draws.
    """

    def __init__(
        self,
        program: Program,
        memo: Memo,
        stage: int,
        axis: MicrobatchAxis | None,
        receive: Callable[[Key], Tensor],
        tells: bool,
        key: Sequence[int],
    ) -> None:
        super().__init__()
        self.program, self.memo, self.stage, self.axis, self.receive = program, memo, stage, axis, receive
        self.tells = tells
        self.draws = tuple(key)
        tail = stage == program.stages
        self.first = program.tail if tail else program.starts[stage]
        self.end = len(program.events) + 1 if tail else program.end(stage)
        self.last = stage >= program.stages - 1
        self.coming = set(program.crossing[stage])
        self.leaving = set() if tail else set(program.crossing[stage + 1])
        self.got: dict[Key, Tensor] = {}
        self.names: dict[int, Key] = {}  # of absent tensors
        self.lost = False  # behind the last unit a value read may have led elsewhere than in the analysis

    def copied(self, x: Tensor) -> Tensor:
        copy = self.memo.copied(x)
        return super().copied(x) if copy is None else copy

    def write_back(self) -> None:
        """Values of the model that the step wrote into tensors of the module get there."""
        with torch.no_grad():
            for target, value in self.written.values():
                if self.memo.is_state(target):
                    target.copy_(value)

    def outputs(self) -> list[Tensor]:
        """What the next stage needs, after the run."""
        return [self.got[key] for key in self.program.crossing[self.stage + 1]]

    def _next(self, func: Any) -> tuple[int, Event | None]:
        index, self.count = self.count, self.count + 1
        if index >= self.end and not self.last:
            raise StageDoneError
        record = self.program.events[index] if index < len(self.program.events) else None
        if not self.lost and (record is None or record.func != func):
            if index < self.program.tail or not self.last:
                raise ElsewhereError(
                    f"{user_line()}: this time the step did something else here than when it began, so that its stages "
                    "can't go on together. What it does must depend on the batch, the module's attributes and random "
                    "numbers of torch, numpy or `random` alone."
                )
            self.lost = True
        return index, None if self.lost else record

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        index, record = self._next(func)
        if record is None:
            return func(*self._present(args), **self._present(kwargs))
        if record.kind == "batch":
            return self.memo.again(index, func, args, kwargs)
        if index < self.first:
            value = self._from_before(index, record)
            return written_into(self, args[0], value, func) if record.writes else value
        target = args[0] if record.writes else None
        with drawing((*self.draws, index), func):
            args, kwargs = self._scaled(self._inputs(args, record.cuts), record), self._inputs(kwargs, record.cuts)
            if target is None:
                return self._made(index, func(*args, **kwargs), record)
            into = args[0].clone()
            func(into, *args[1:], **kwargs)
            return written_into(self, target, self._made(index, into, record), func)

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        index, record = self._next(path)
        if record is None:
            raise ElsewhereError(f"{user_line()}: {path!r} is called where it was not when the step was recorded.")
        if index < self.first:
            return self._from_before(index, record)
        with drawing((*self.draws, index), module):
            result = original(*self._local(self._inputs(args, True)), **self._local(self._inputs(kwargs, True)))
        return self._made(index, self._as_recorded(path, result, record), record)

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        record = self._next(("metric", method))[1]
        if not self.tells and record is not None:
            return map_tensors(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device), record.result)
        return original(*self._present(args), **self._present(kwargs))

    def _from_before(self, index: int, record: Event) -> Any:
        """A value of an earlier stage: received where it is needed, else absent."""
        if record.kind == "read":
            return record.result
        numbers = iter(range(len(tensors_in(record.result))))

        def value(absent: Tensor) -> Tensor:
            key = (index, next(numbers))
            self.names[id(absent)] = key
            if key not in self.coming:
                return absent
            self.got[key] = self.receive(key)
            return self.got[key]

        return map_tensors(value, record.result)

    def _present(self, value: Any) -> Any:
        """``value`` with what has been received in place of absent tensors."""
        names = self.names
        if not names:
            return value

        def find(x: Tensor) -> Tensor:
            key = names.get(id(x))
            if key is None:
                return x
            if key not in self.got:
                raise ElsewhereError(
                    f"{user_line()}: the step uses a value here that was computed on an earlier stage and was not used "
                    "here when the step was recorded. Which values a step uses must not depend on values that it reads."
                )
            return self.got[key]

        return map_tensors(find, value)

    def _inputs(self, value: Any, cuts: bool) -> Any:
        """``value`` as a located event takes it: absent tensors found, whole samples cut to the microbatch."""
        value = self._present(value)
        if self.axis is None or not cuts:
            return value
        axis, keys, layouts = self.axis, self.memo.keys, self.program.layouts

        def cut(x: Tensor) -> Tensor:
            layout = layouts.get(keys.get(id(x), (-2, 0)))
            return x if layout is None else cut_to(x, layout, axis)

        return map_tensors(cut, value)

    def _local(self, value: Any) -> Any:
        return map_tensors(lambda x: x.local if isinstance(x, ShardedTensor) else x, value)

    def _scaled(self, args: Any, record: Event) -> Any:
        if not record.shares or self.axis is None:
            return args
        share = share_of(self.program, self.axis)

        def scaled(x: Any) -> Any:
            return x * share

        items: list[Any] = list(args)
        for place in record.shares:
            items[place] = scaled(items[place])
        return tuple(items)

    def _as_recorded(self, path: str, result: Any, record: Event) -> Any:
        """A unit's result as the step sees it: samples of a microbatch stand for the whole batch's."""
        if self.axis is None:
            return result
        axis = self.axis
        recorded: Iterator[Tensor] = iter(tensors_in(record.result))

        def wrap(x: Tensor) -> Tensor:
            model = next(recorded, None)
            if not isinstance(model, ShardedTensor):
                return x
            expected = local_shape(model, axis)
            if tuple(x.shape) != expected:
                raise ElsewhereError(f"{path!r} returned {tuple(x.shape)} where {expected} was expected.")
            return ShardedTensor(x, model.sharded_dim, model.positions, axis)

        return map_tensors(wrap, result)

    def _made(self, index: int, result: Any, record: Event) -> Any:
        if self.leaving or self.coming:
            for n, x in enumerate(tensors_in(result)):
                self.got[index, n] = x
            if self.names:  # user code may still hold the absent tensor that was written into
                self.names.update((id(x), (index, n)) for n, x in enumerate(tensors_in(record.result)))
        return result


def touches_state(func: Any, args: Any, kwargs: Any, result: Any, is_state: Callable[[Tensor], bool]) -> bool:
    """Whether a function of the batch alone writes into a tensor of the module's, or returns it or a view of it."""
    own = [x for x in tensors_in((args, kwargs)) if is_state(x)]
    if not own:
        return False
    if writes(getattr(func, "__name__", "")) and any(x is args[0] for x in own):
        return True
    storages = {x.untyped_storage().data_ptr() for x in own} - {0}
    return any(x.untyped_storage().data_ptr() in storages for x in tensors_in(result))


def written_into(run: Run, target: Tensor, value: Tensor, func: Any) -> Any:
    """Let ``target``, which depended on the batch alone, stand for ``value``; what the writing function returns."""
    run.written[id(target)] = (target, value)
    return None if func.__name__ == "__setitem__" else value


def cut_to(x: Tensor, layout: tuple[int, Any], axis: MicrobatchAxis) -> ShardedTensor:
    """A whole tensor's samples of one microbatch."""
    dim, positions = layout
    own = positions.indices(axis.rank)
    if len(own) and own[-1] - own[0] + 1 == len(own):
        local = x.narrow(dim, int(own[0]), len(own))
    else:
        local = x.index_select(dim, positions.index(axis.rank, x.device))
    return ShardedTensor(local, dim, positions, axis)


def local_shape(model: Tensor, axis: MicrobatchAxis | None) -> tuple[int, ...]:
    """The shape that the value recorded as ``model`` has in a microbatch."""
    if not isinstance(model, ShardedTensor) or axis is None:
        return tuple(model.shape)
    shape = list(model.shape)
    shape[model.sharded_dim] = model.positions.count(axis.rank)
    return tuple(shape)


def share_of(program: Program, axis: MicrobatchAxis) -> float:
    """The microbatch's share of the batch's samples."""
    return axis.positions(program.samples).count(axis.rank) / program.samples
