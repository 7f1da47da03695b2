"""What a trial run of a step tells beside its functions: the modules they ran in, and what autograd keeps of them."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.trial.survey import Survey
from lightning_par.pipeline.trial.surveyor import Surveyor
from lightning_par.planner.recording.by_hand import hear_clips
from lightning_par.planner.recording.checkpointed import Region
from lightning_par.planner.recording.told_values import Told, hear_gathers, hear_told, kept_by
from lightning_par.planner.recording.users_hooks import hooked
from lightning_par.private.modes import no_modes
from lightning_par.private.module_hooks import number_of_backward_hooks
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.storage import memory_of, storage_of
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.trial.fake_functions import is_fake

MemoryKey = int
"""Which memory a tensor lies in, within one trial run."""


@dataclass(frozen=True)
class Kept:
    """Memory that autograd keeps for the backward of one function.

    Attributes:
        memory: which memory it is; functions that keep the same one share it.
        nbytes: of the whole memory.
        numel: of the tensor.
        itemsize: of one of its elements.
        shape: of the tensor.
    """

    memory: MemoryKey
    nbytes: int
    numel: int
    itemsize: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """Of one function.

    Attributes:
        call: of a module, by its number, in which it ran.
        kept: what autograd keeps of it.
        off: ids of the parameters that it takes, and that require no gradient as it runs.
        region: that backward runs again and it is in, counted from 1; 0: in none.
    """

    call: int
    kept: tuple[Kept, ...]
    off: frozenset[int] = frozenset()
    region: int = 0


@dataclass(frozen=True)
class Call:
    """The call of a module.

    Attributes:
        path: the module's name.
        outer: the number of the call that it lies in.
    """

    path: str
    outer: int


@dataclass(frozen=True)
class BatchValue:
    """Memory of what neither parameters nor what came of them determine.

    Attributes:
        call: of a module, in which it was made.
        nbytes: of the memory.
        grows: whether the batch determines it.
    """

    call: int
    nbytes: int
    grows: bool


@dataclass(frozen=True)
class Heard:
    """What `StepNotes` heard.

    Attributes:
        calls: of modules, in the order in which they began; the first is the step itself.
        notes: of each function in order, by the ids of the tensors that it made.
        survey: what a run of the step for a pipeline alone would see; None where that would tell more.
        held: ids of tensors that variables held, and what the last function made meanwhile; empty where not looked for.
        batch_values: in order, each memory once, without what the batch and the module hold themselves.
        regions: that backward runs again, in their order.
        told: what the step logged and printed, and what modules hold of it as it ends.
        gathers: lines at which the step gathers what other replicas have.
        clips: bounds and algorithms of the clips of gradients that the step makes itself.
        watched: names of modules with backward hooks of the user's.
        hooked: parameters on whose gradients hooks of the start of a run have hung some; see `hooked`.
    """

    calls: tuple[Call, ...]
    notes: Mapping[int, Sequence[Note]]
    survey: Survey | None
    held: Mapping[int, int]
    batch_values: tuple[BatchValue, ...]
    regions: tuple[Region, ...] = ()
    told: tuple[Told, ...] = ()
    hooked: Mapping[str, int] = field(default_factory=dict)
    watched: tuple[str, ...] = ()
    clips: tuple[tuple[Any, Any], ...] = ()
    gathers: tuple[str, ...] = ()


class StepNotes(Surveyor):
    """Listens to one trial run; see `lightning_par.trial.listener.Listener`.

    Args:
        samples: of the batch.
        looks: whether to look which tensors are held by variables of the code that runs; slower.
    """

    def __init__(self, samples: int, looks: bool = False) -> None:
        super().__init__(samples)
        self.looks, self.held = looks, dict[int, int]()
        self.notes: dict[int, list[Note]] = defaultdict(list)
        self.calls_made = [Call("", 0)]
        self._running = [0]
        self._pending: list[Kept] = []
        self._written_out = False  # whether what `note` tells of next was told of in parts
        self._batch_values: dict[int, BatchValue] = {}  # by memory
        self._fixed: set[int] = set()  # ids of tensors that even the batch does not determine
        self._regions: list[Region] = []
        self._depth = 0  # of regions that are within one another
        self._told: list[Told] = []
        self._copy: nn.Module | None = None
        self._hooked: dict[str, int] = {}
        self._watched: tuple[str, ...] = ()
        self._clips: list[tuple[Any, Any]] = []
        self._gathers: dict[str, None] = {}
        self._alive: list[Any] = []  # what ids and memories are told of: once freed, others could have the same

    def begin(self, copy: nn.Module) -> None:
        super().begin(copy)
        self._copy, self._hooked = copy, hooked(copy)
        self._watched = tuple(path for path, m in copy.named_modules() if number_of_backward_hooks(m))
        hear_gathers(copy, lambda line: self._gathers.update({line: None}))
        hear_clips(copy, lambda *clip: self._clips.append(clip))
        hear_told(copy, lambda value: self._tell(self.calls_made[self._running[-1]].path, tensors_in(value)))

    def _tell(self, path: str, values: Sequence[Tensor]) -> None:
        self._alive += values
        self._told += [Told(id(x), path) for x in values]

    def enter_module(self, path: str, numel: int) -> None:
        super().enter_module(path, numel)
        self.calls_made.append(Call(path, self._running[-1]))
        self._running.append(len(self.calls_made) - 1)

    def leave_module(self) -> None:
        super().leave_module()
        self._running.pop()

    def begin_region(self, region: Region) -> None:
        """What follows is run again in backward; what is within that is a part of it."""
        if not self._depth:
            self._regions.append(region._replace(call=self._running[-1]))
        self._depth += 1

    def end_region(self) -> None:
        """Up to here."""
        self._depth -= 1

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, of_model: bool, unsized: bool = False) -> None:
        super().note(func, args, kwargs, result, of_model, unsized)
        if not self._written_out:  # else all that is kept was another's, of those within it
            self._note(args, kwargs, result, of_model)
        self._written_out = False
        made = next((id(x) for x in tree_leaves(result) if isinstance(x, Tensor)), None)
        if self.looks and made is not None:
            self.held.update((id(x), made) for x in in_variables(sys._getframe(1)))

    def note_within(self, args: Any, kwargs: Any, result: Any, of_model: bool) -> None:
        self._written_out = True
        self._note(args, kwargs, result, of_model)

    def _note(self, args: Any, kwargs: Any, result: Any, of_model: bool) -> None:
        kept, self._pending = tuple(self._pending), []
        weights = (x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter))
        off = frozenset(id(x) for x in weights if not x.requires_grad)
        region = len(self._regions) if self._depth else 0
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._alive.append(x)
                self.notes[id(x)].append(Note(self._running[-1], kept, off, region))
                kept = ()
        if not of_model:
            self._note_values(tensors_in((args, kwargs)), tensors_in(result))

    def _note_values(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        grows = any(id(x) not in self._fixed and id(x) not in self.buffers for x in given)
        memories = {memory_of(x) for x in given if storage_of(x) is not None}
        for x in made:
            if not grows:
                self._fixed.add(id(x))
            storage = storage_of(x)
            if storage is not None and memory_of(x) not in memories:
                value = BatchValue(self._running[-1], storage.nbytes(), grows)
                self._batch_values.setdefault(memory_of(x), value)

    def end(self) -> Any:
        values = tuple(self._batch_values.values())
        for path, x in () if self._copy is None else kept_by(self._copy):
            self._tell(path, [x])
        regions, told, hooks = (
            tuple(self._regions),
            tuple(self._told),
            (self._hooked, self._watched, tuple(self._clips), tuple(self._gathers)),
        )
        return Heard(tuple(self.calls_made), self.notes, super().end(), self.held, values, regions, told, *hooks)

    def keeps(self) -> AbstractContextManager[Any]:
        """Around the step: tensors that autograd keeps are heard."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    @no_modes()  # it is called within autograd functions of the user's, whose functions are recorded
    def _pack(self, x: Tensor) -> Tensor:
        if is_fake(x) and memory_of(x) not in self._batch_values:
            self._pending.append(kept_of(x))
            self._alive.append(x.untyped_storage())
        return x


def in_variables(frame: types.FrameType | None) -> Iterator[Tensor]:
    """The tensors that variables hold of the code that called ``frame``, but this package's."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("lightning_par."):
            for value in frame.f_locals.values():
                yield from _tensors_in(value, 2)
        frame = frame.f_back


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one, depth - 1)


def kept_of(x: Tensor) -> Kept:
    """The memory of ``x``, as autograd would keep it."""
    return Kept(memory_of(x), x.untyped_storage().nbytes(), x.numel(), x.element_size(), tuple(x.shape))
