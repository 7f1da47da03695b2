"""Objects whose content is one value: arrays, buffers of bytes and text, generators of random numbers, files."""

from __future__ import annotations

import array
import io
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.python_state.cached_results import Remembered
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.changes import ValueChange
from lightning_par.python_state.referents import holds

LARGE = 1 << 16  # elements of an array that is not copied for every run


class ValueCell(Cell):
    """An object that can be read and written as one value.

    Args:
        name: how the user reaches it.
        owner: the object.
        read: takes its content.
        write: puts content back.
    """

    def __init__(
        self, name: str, owner: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None],
        fixed: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, owner, fixed)
        self.read, self.write = read, write
        self.before = read(owner)

    def moved(self) -> bool:
        return not same(self.read(self.owner), self.before)

    def renew(self, atoms: Collection[Any]) -> bool:
        if isinstance(self.owner, np.ndarray) and self.owner.dtype.hasobject:
            return super().renew(atoms)
        self.before = self.read(self.owner)
        return True

    def change(self) -> ValueChange | None:
        now = self.read(self.owner)
        return None if same(now, self.before) else ValueChange(now)

    def restore(self) -> None:
        if self.moved():
            self.write(self.owner, self.before)

    def apply(self, change: ValueChange) -> None:
        self.write(self.owner, change.value)


class CacheCell(Cell):
    """What `functools.lru_cache` made: what it remembers of a trial is no state, unless that computed on fakes."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self.before = owner.cache_info()
        self.remembered = Remembered(owner)

    def change(self) -> None:
        return None

    def restore(self) -> None:
        now, before = self.owner.cache_info(), self.before
        if now.misses != before.misses:
            if self.forgets(before, now):
                self._let_go()
            self.remembered.note()
        self.before = self.owner.cache_info()

    def forget(self) -> None:
        """What a trial has added goes."""
        if self.owner.cache_info().misses != self.before.misses and self._is_exact():
            self._let_go()

    def forgets(self, before: Any, now: Any) -> bool:
        """Whether what was computed between two ``cache_info()`` goes."""
        return holds(self.owner, lambda x: isinstance(x, FakeTensor))

    def _is_exact(self) -> bool:
        """Whether what was there before stays where the rest goes."""
        return self.remembered.is_known or not self.before.currsize

    def _let_go(self) -> None:
        if self.remembered.is_known:
            self.remembered.put_back()
        else:
            self.owner.cache_clear()


class MethodCacheCell(CacheCell):
    """One of a method, for an object of which each trial has a copy, or that each run of the step makes anew: what it
    remembers of a run goes, too: the next run would else be spared what this one had to compute."""

    def forgets(self, before: Any, now: Any) -> bool:
        return self._is_exact() or super().forgets(before, now)


class LockedCell(Cell):
    """An array that is too large to be copied for every run: a run may read it alone."""

    def lock(self) -> None:
        self.owner.flags.writeable = False

    def arrays(self) -> list[tuple[str, np.ndarray[Any, Any]]]:
        """The arrays, with their names."""
        return [(self.name, self.owner)]

    def change(self) -> None:
        return None

    def restore(self) -> None:
        unlock(self.owner)


def unlock(array: np.ndarray[Any, Any]) -> None:
    """Let an array be written again, and first the one of which it is a view."""
    if isinstance(array.base, np.ndarray) and not array.base.flags.writeable:
        unlock(array.base)
    array.flags.writeable = True


def is_value(value: Any) -> bool:
    """Whether the content of an object is one value, which may change."""
    return any(isinstance(value, kind) for kind, _, _ in _KINDS)


def cell_of_value(name: str, value: Any, fixed: str | None = None) -> Cell | None:
    """The cell of an object whose content is one value; None for anything else."""
    found = next(((read, write) for kind, read, write in _KINDS if isinstance(value, kind)), None)
    if found is None:
        return None
    if isinstance(value, np.ndarray) and value.size > LARGE:
        return LockedCell(name, value, fixed) if value.flags.writeable else None
    try:
        return ValueCell(name, value, *found, fixed)
    except Exception:  # closed, released, read-only, or of a class that allows only some of it
        return None


def same(a: Any, b: Any) -> bool:
    """Whether two contents are equal, entry by entry where they are nested; NaNs are equal."""
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and a and isinstance(a[0], (str, np.ndarray, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _write_bytes(view: memoryview, content: bytes) -> None:
    view.cast("B")[:] = content


def _read_view(view: memoryview) -> bytes:
    if view.readonly:
        raise TypeError("nobody can change it through this")
    return view.tobytes()


def _write_text(buffer: Any, content: tuple[Any, int]) -> None:
    buffer.seek(0)
    buffer.truncate(0)
    buffer.write(content[0])
    buffer.seek(content[1])


def _write_array(values: array.array[Any], content: bytes) -> None:
    del values[:]
    values.frombytes(content)


def _set_state(generator: Any, state: Any) -> None:
    generator.state = state


def _set_torch_state(generator: torch.Generator, state: bytes) -> None:
    # torch wants memory that can be written
    generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))


def _fill(values: np.ndarray[Any, Any], content: Any) -> None:
    values[...] = content


def _place(file: Any) -> int:
    if not file.seekable():
        raise TypeError("it has no place to go back to")
    return int(file.tell())


_Kind = tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]
_KINDS: tuple[_Kind, ...] = (
    (np.ndarray, lambda x: x.copy(), _fill),
    (torch.Generator, lambda x: x.get_state().numpy().tobytes(), _set_torch_state),
    (random.Random, lambda x: x.getstate(), lambda x, state: x.setstate(state)),
    (np.random.Generator, lambda x: x.bit_generator.state, lambda x, state: _set_state(x.bit_generator, state)),
    (np.random.RandomState, lambda x: x.get_state(legacy=False), lambda x, state: x.set_state(state)),
    (np.random.BitGenerator, lambda x: x.state, _set_state),
    (bytearray, bytes, lambda x, content: x.__setitem__(slice(None), content)),
    (array.array, lambda x: x.tobytes(), _write_array),
    (memoryview, _read_view, _write_bytes),
    ((io.StringIO, io.BytesIO), lambda x: (x.getvalue(), x.tell()), _write_text),
    (io.IOBase, _place, lambda x, place: x.seek(place)),
)
"""By kind: how the content of an object is read and written."""
