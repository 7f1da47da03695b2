"""What a trial run of a step tells beside its functions: the modules they ran in, and what autograd keeps of them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private.pytree import tree_leaves
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
    """Of one function: the module it ran in, by name, and what autograd keeps of it."""

    path: str
    kept: tuple[Kept, ...]
    checkpointed: bool = False


@dataclass
class StepNotes:
    """Listens to one trial run; see `lightning_par.trial.listener.Listener`.

    Attributes:
        notes: of each function in order, by the ids of the tensors that it made, which the recording keeps alive.
    """

    notes: dict[int, list[Note]] = field(default_factory=lambda: defaultdict(list))
    path: list[str] = field(default_factory=lambda: [""])
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names: dict[int, str] = {}
        self._pending: list[Kept] = []

    def begin(self, copy: nn.Module) -> None:
        self._names = {id(m): name for name, m in copy.named_modules()}

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, of_model: bool, unsized: bool = False) -> None:
        kept, self._pending = tuple(self._pending), []
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.notes[id(x)].append(Note(self.path[-1], kept))
                kept = ()

    def end(self) -> StepNotes:
        return self

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Around the step: calls of modules and tensors that autograd keeps are heard."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._entered),
            nn.modules.module.register_module_forward_hook(self._left, always_call=True),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, module: nn.Module, args: Any) -> None:
        self.path.append(self._names.get(id(module), self.path[-1]))
        self.calls.append(self.path[-1])

    def _left(self, module: nn.Module, args: Any, result: Any) -> None:
        self.path.pop()

    def _pack(self, x: Tensor) -> Tensor:
        if is_fake(x) and not isinstance(x, nn.Parameter):
            self._pending.append(kept_of(x))
        return x


def memory_of(x: Tensor) -> MemoryKey:
    """Which memory a fake tensor lies in."""
    return int(x.untyped_storage()._cdata)


def kept_of(x: Tensor) -> Kept:
    """The memory of ``x``, as autograd would keep it."""
    return Kept(memory_of(x), x.untyped_storage().nbytes(), x.numel(), x.element_size(), tuple(x.shape))
