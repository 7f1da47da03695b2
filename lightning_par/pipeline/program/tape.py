"""What a dry run saw of the step that is about to run: its events with their arguments, as the user's code made them.

A stage can then be run by these alone, the user's step left out. What can't be told this way is noted as `unlike`: a
stage that has some of it runs the user's step, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.console import Said
from lightning_par.pipeline.effects.logged_outputs import LogRecord
from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.held_objects import Held, HeldByUnits, are_same
from lightning_par.pipeline.program.program import Key, Program, StepEvent
from lightning_par.private.modes import surroundings
from lightning_par.sharded.rules.in_place import is_told_to

_PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
))  # fmt: skip


def may_be_taped(program: Program) -> bool:
    """Whether stages of a step may be run by a tape: it pays where several microbatches follow the one dry run."""
    told_to_others = program.keeping or program.outer or program.overwritten or program.regions
    in_backward = program.hooked or program.hooked_later or program.in_hooks
    in_each_run = program.changes_batch or any(event.remade or event.graphed for event in program.events)
    return program.microbatches > 1 and not (told_to_others or in_backward or in_each_run)


_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)


class UnlikeError(Exception):
    """Something can't be told by a tape."""


@dataclass(frozen=True)
class Absent:
    """Stands for a value of the model."""

    key: Key


@dataclass
class Call:
    """One event: what it was given, with an `Absent` for each value of the model.

    Attributes:
        func: the torch function, or the unit's FQN.
        nested: whether values of the model are within lists, tuples or dicts.
        module: the unit.
        original: what its call runs.
        held: what the modules in the unit held then, and what their code named.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nested: bool
    module: nn.Module | None = None
    original: Callable[..., Any] | None = None
    held: Held | None = None

    def keys(self) -> list[Key]:
        """The values of the model that it was given."""
        if self.nested:
            return keys_in((self.args, self.kwargs))
        return [x.key for x in (*self.args, *self.kwargs.values()) if type(x) is Absent]

    def is_as_it_was(self) -> bool:
        """Whether the unit's modules hold the same objects as when the step called it."""
        return self.held is None or self.held.is_as_it_was()

    def may_be_put_back(self, first: bool) -> bool:
        """Whether what the unit has kept since the step called it can be undone, which it has run for the ``first``
        time."""
        return self.held is None or self.held.may_be_put_back(first)

    def put_back(self) -> None:
        """Undo what the unit has kept, if it `may_be_put_back`."""
        if self.held is not None:
            self.held.put_back()


class Tape:
    """Notes what a dry run meets of some stages.

    Args:
        program: of the step.
        memo: what depends on the batch alone.
        rank: whose stages count.
        moves: what of the watched Python state is other than before the step.
        original: the tensor of the module for which another stands in while the step runs; None of others.
        held: what units hold, beside that state.
    """

    def __init__(
        self,
        program: Program,
        memo: BatchValues,
        rank: int,
        moves: Callable[[], Any],
        original: Callable[[Tensor], Tensor | None],
        held: HeldByUnits,
    ) -> None:
        self.program, self.memo, self.held = program, memo, held
        self.moves, self.original = moves, original
        stages = [stage for stage, at in enumerate(program.at) if at == rank]
        self.own = {index for stage in stages for index in range(program.starts[stage], program.end(stage))}
        self.last = program.stages - 1 in stages
        self.calls: dict[int, Call] = {}
        self.unlike: set[int] = set()  # events that it can't tell
        self.around: Any = None  # see `surroundings`
        self.context: list[Any] = []  # see `_context`
        self.moved: Any = None  # as the step begins: what stands in for functions
        self.result: Any = None
        self.logs: list[LogRecord] | None = []  # None where something was said that can't be told
        self.names: dict[int, Key] = {}  # of absent tensors; the dry run's

    def begin(self, names: dict[int, Key]) -> None:
        """The step begins; ``names`` tells absent tensors as they are made."""
        self.names, self.around, self.moved = names, surroundings(), self.moves()
        self.context = _context()

    def note(self, index: int, record: StepEvent, func: Any, args: Any, kwargs: Any) -> None:
        """An event is about to run."""
        if index not in self.own or record.kind in ("batch", "update") or record.itself is not None:
            return
        try:
            self._check(record, func, args, kwargs)
            given, named = tuple(map(self._told, args)), {key: self._told(x) for key, x in kwargs.items()}
            nested = any(type(x) in (tuple, list, dict) for x in (*given, *named.values()))
            self.calls[index] = Call(func, given, named, nested)
        except UnlikeError:
            self.unlike.add(index)

    def note_unit(self, index: int, path: str, module: nn.Module, original: Callable[..., Any], alone: bool) -> None:
        """The event is the unit ``path``; ``alone`` if no mode of the user's is around it."""
        call = self.calls.get(index)
        if call is None:
            return
        if not alone or self.moves() != self.moved:
            self.unlike.add(index)
        call.module, call.original, call.held = module, original, self.held.of(path, module)

    def spoil(self) -> None:
        """The step did something that no event shows."""
        self.unlike |= self.own

    def end(self, result: Any) -> None:
        """The step has returned."""
        if not self.last:
            return
        try:
            self.result = self._told(result)
        except UnlikeError:
            self.unlike.add(max(self.own))
        if self.logs is not None and (self.moves() != self.moved or not self._is_of_model(self.result)):
            self.logs = None

    # ------------------------------------------------------------------------------------------------- what it says

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """``self.log`` of the step."""
        if self.logs is None or not self.last:
            return
        try:
            told = self._told(value)
            if not self._is_of_model(told) or any(type(x) not in _PLAIN for x in (*args, *kwargs.values())):
                raise UnlikeError
            self.logs.append(LogRecord(name, told, args, kwargs))
        except UnlikeError:
            self.logs = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``self.print`` of the step."""
        self.logs = None

    def hear(self, said: Said) -> None:
        """The step says something."""
        self.logs = None

    # ------------------------------------------------------------------------------------------------------- values

    def _check(self, record: StepEvent, func: Any, args: Any, kwargs: Any) -> None:
        if not record.may_be_told or not isinstance(func, str) and not _is_of_torch(func):
            raise UnlikeError
        if "out" in kwargs or is_told_to(func, args, kwargs) or surroundings() != self.around:
            raise UnlikeError
        if not are_same(_context(), self.context):
            raise UnlikeError

    def _told(self, x: Any) -> Any:
        kind = type(x)
        if kind in _PLAIN:
            return x
        if isinstance(x, Tensor):
            return self._tensor(x)
        if kind is tuple or kind is list:
            return kind([self._told(part) for part in x])
        if kind is dict:
            return {key: self._told(part) for key, part in x.items()}
        if kind is slice and all(type(part) in _PLAIN for part in (x.start, x.stop, x.step)):
            return x
        raise UnlikeError

    def _tensor(self, x: Tensor) -> Any:
        key = self.names.get(id(x))
        if key is not None:
            return Absent(key)
        if isinstance(x, nn.Parameter):
            return x
        key = self.memo.keys.get(id(x))
        if key is not None:
            made = key[0] >= 0 and self.program.events[key[0]].kind != "batch"  # a size that the batch tells
            if made or self.memo.is_state(x):
                raise UnlikeError
            return x
        found = self.original(x)
        if found is None:
            raise UnlikeError
        return found

    def _is_of_model(self, told: Any) -> bool:
        """Whether what was noted has no tensors but values of the model."""
        if type(told) in (tuple, list):
            return all(map(self._is_of_model, told))
        if type(told) is dict:
            return all(map(self._is_of_model, told.values()))
        return not isinstance(told, Tensor)


def _context() -> list[Any]:
    """All `contextvars.ContextVar` that are set, and their values: libraries keep settings there, as numpy does what
    `numpy.errstate` sets."""
    context = copy_context()
    return [*context, *context.values()]


def filled(told: Any, value: Callable[[Key], Any]) -> Any:
    """What was noted, with values in place of the absent."""
    kind = type(told)
    if kind is Absent:
        return value(told.key)
    if kind is tuple or kind is list:
        return kind([filled(x, value) for x in told])
    if kind is dict:
        return {key: filled(x, value) for key, x in told.items()}
    return told


def keys_in(told: Any) -> list[Key]:
    """The values of the model in what was noted."""
    found: list[Key] = []
    filled(told, found.append)
    return found


def _is_of_torch(func: Any) -> bool:
    """Whether a function is torch's own, and takes its arguments alone: one of the user's may close over values."""
    if isinstance(func, FunctionType):
        return func.__module__.partition(".")[0] == "torch" and all(
            callable(cell.cell_contents) or type(cell.cell_contents) in _PLAIN for cell in func.__closure__ or ()
        )
    return isinstance(func, _BUILT_IN)
