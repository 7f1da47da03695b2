"""Memory that several values of a step share, and who writes into it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.private.modes import DisableTorchFunction, TorchDispatchMode
from lightning_par.private.operators import schema_of, written_arguments
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.rules.lookup import user_line


class SharedStorage(TorchDispatchMode):
    """On around a recorded run, it notes which events write into the memory of which values.

    Attributes:
        written: the events that write into the memory of a value after it was made, ascending.
        names: of parameters and buffers, by their memory.
        places: where the user's code last wrote into one of those, by its name.

    Example::

        memory = Memory()
        with memory:
            x = torch.ones(3)
            memory.made((0, 0), x)
            x[:1].add_(1)
            memory.settle(1)
        assert memory.written == {(0, 0): [1]}
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[Key, list[int]] = defaultdict(list)
        self.sharing: dict[StorageWeakRef, list[Key]] = defaultdict(list)
        self.names: dict[StorageWeakRef, str] = {}
        self.places: dict[str, str] = {}
        self._now: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _mutable(func) if _writes(func, args, kwargs) else ():
            value = args[place] if place < len(args) else kwargs.get(name)
            for x in tensors_in(value):
                self.note_write(x)
        with DisableTorchFunction():  # a kernel is no event, even where no torch function stands before it
            return func(*args, **kwargs)

    def note_write(self, x: Tensor) -> None:
        """Something writes into ``x``."""
        memory = memory_reference(x)
        if memory is not None:
            self._now.add(memory)
            if memory in self.names:
                self.places[self.names[memory]] = user_line()

    @contextmanager
    def replaced(self, x: Tensor) -> Iterator[None]:
        """Inside ``x.data`` is set, which writes into ``x``, and gives it other memory."""
        self.note_write(x)
        name = self.names.get(memory) if (memory := memory_reference(x)) is not None else None
        yield
        if name is not None and (memory := memory_reference(x)) is not None:
            self.names[memory] = name

    def made(self, key: Key, x: Tensor) -> None:
        """The value ``key`` is ``x``."""
        if (memory := memory_reference(x)) is not None:
            self.sharing[memory].append(key)

    def forget(self) -> None:
        """What was written since was written by a function of the batch alone, which no value shares memory with."""
        self._now.clear()

    def settle(self, event: int) -> set[StorageWeakRef]:
        """What was written since was written by ``event``, into values that were made before; returns all of it."""
        now, self._now = self._now, set()
        for memory in now & self.sharing.keys():
            for key in self.sharing[memory]:
                self.written[key].append(event)
        return now


_STATISTICS = ("running_mean", "running_var")


@cache
def _mutable(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that a function writes into, by place and name."""
    arguments = list(enumerate(schema_of(func).arguments))
    if schema_of(func).name.endswith("_batch_norm") and any(a.name == "training" for _, a in arguments):
        return tuple((place, a.name) for place, a in arguments if a.name in _STATISTICS)  # which no schema says
    return tuple(written_arguments(func))


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it does so in this call: batch norm in training alone."""
    place = _flag(func)
    return place is None or bool(args[place] if place < len(args) else kwargs.get("training"))


@cache
def _flag(func: Any) -> int | None:
    norm = _mutable(func) and _mutable(func)[0][1] in _STATISTICS
    arguments = schema_of(func).arguments if norm else ()
    return next((place for place, a in enumerate(arguments) if a.name == "training"), None)
