"""The tensor of a checkpoint whose values are fetched when something reads them: from other ranks, or from a disk.

To user code it is a tensor on the CPU. What reads it fetches the values and gives them up again; what writes to it, or
makes a view of it, keeps them. `torch.save` fetches one after another and keeps none.
"""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_par.absent.base import AbsentTensor
from lightning_par.checkpoint.buffers import Scratch
from lightning_par.private.checkpoints import LateStorage, parameter_of_pickle, reduced_late
from lightning_par.private.modules import hand_on_metadata
from lightning_par.private.operators import schema_of
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.functions import SAME_MEMORY_OPERATORS, operator_of

_CPU = torch.device("cpu")
_PAGES_FROM = 128 * 1024
"""Bytes, as in malloc before it has freed larger ones. A process may have some 65,000 mappings."""


class Source(Protocol):
    """Where the values of a tensor are."""

    shape: torch.Size
    dtype: torch.dtype
    scratch: Scratch
    """For values that are written to a file and not needed after."""

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        """Write the values into ``target``: all of them, or those at ``indices``, ascending, of ``dim``."""


class _Memory:
    """What an `Unread` and its aliases share: the source, and the values once they have to be kept."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kept: Tensor | None = None
        self._storage: weakref.ref[LateStorage] | None = None
        self._room: Tensor | None = None

    def storage(self) -> LateStorage:
        """The same one as long as something holds it: what shares memory shares it in a file, too."""
        storage = None if self._storage is None else self._storage()
        if storage is None:
            nbytes = self.source.shape.numel() * self.source.dtype.itemsize
            storage = LateStorage(nbytes, self._written, lambda: self.room().data_ptr())
            self._storage = weakref.ref(storage)
        return storage

    def room(self) -> Tensor:
        """Where the values will be. Memory that nothing was written to has an address, and takes none of the host's."""
        if self._room is None:
            self._room = _own_pages(self.source.shape, self.source.dtype)
        return self._room

    def _written(self) -> torch.UntypedStorage:
        shape, dtype = self.source.shape, self.source.dtype
        values = self._fetched(self.source.scratch.empty(shape, dtype)) if self.kept is None else self.kept
        return values.untyped_storage()

    def read(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        return self._fetched(torch.empty(self.source.shape, dtype=self.source.dtype))

    def _fetched(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.source.copy_into(values)
        return values

    def keep(self) -> Tensor:
        if self.kept is None:
            self.kept = self._fetched(self.room())
        return self.kept


def _own_pages(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Uninitialised. Its memory goes back to the system with it: the heap keeps what many tensors were freed of."""
    size = shape.numel() * dtype.itemsize
    if size < _PAGES_FROM:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class Unread(AbsentTensor):
    """A tensor whose values are at a ``source``.

    Args:
        source: where to fetch them.
        memory: that of another one, with which this shares it.

    Example::

        weight = Unread(source)
        torch.save({"weight": weight}, "file")  # holds its values while they are written
    """

    _facts: _Memory

    @staticmethod
    def __new__(cls, source: Source, memory: Any = None) -> Unread:
        return cls._standing(_Memory(source) if memory is None else memory, source.shape, source.dtype, _CPU)

    @property
    def source(self) -> Source:
        """Where the values come from."""
        return self._facts.source

    @property
    def memory(self) -> object:
        """The same object for tensors that share memory."""
        return self._facts

    @property
    def is_kept(self) -> bool:
        """Whether the values are here, since something wrote to them or made a view of them."""
        return self._facts.kept is not None

    def read(self) -> Tensor:
        """The values, plain."""
        return self._facts.read()

    def keep(self) -> Tensor:
        """The values, plain, in memory that stays as long as this one does."""
        return self._facts.keep()

    def read_part(self, dim: int, indices: Sequence[int] | Any) -> Tensor:
        """The values at the ascending ``indices`` of ``dim``, plain and contiguous, in memory of their own."""
        shape = [*self.shape[:dim], len(indices), *self.shape[dim + 1 :]]
        part = torch.empty(shape, dtype=self.dtype)
        self.read_into(part, dim, indices)
        return part

    @torch.no_grad()
    def read_into(self, target: Tensor, dim: int = 0, indices: Sequence[int] | Any = None) -> None:
        """Write the values, or those at the ascending ``indices`` of ``dim``, into the plain ``target`` on the CPU."""
        kept = self._facts.kept
        if kept is not None:
            target.copy_(kept if indices is None else kept.index_select(dim, torch.as_tensor(indices)))
        else:
            self.source.copy_into(target, dim, indices)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if operator_of(func) in SAME_MEMORY_OPERATORS and isinstance(first, Unread):
            return Unread(first.source, first.memory)
        if operator_of(func) == "clone" and isinstance(first, Unread) and not first.is_kept:
            return first.read()  # all strides are those of a contiguous tensor
        if operator_of(func) == "copy_" and not isinstance(first, Unread) and not args[1].is_kept:
            target, source = first, args[1].source
            if type(target) is Tensor and (target.shape, target.dtype) == (source.shape, source.dtype):
                source.copy_into(target)
                return target
        aliases = [argument.alias_info is not None for argument in schema_of(func).arguments]
        # kept where they are written, or the result may share their memory
        given = [_real(x, keep) for x, keep in zip(args, aliases)]
        out = func(*given, **{key: _real(x, keep=True) for key, x in kwargs.items()})
        return next((x for x, y in zip(args, given) if out is y and isinstance(x, Unread)), out)

    def numpy(self, *, force: bool = False) -> Any:
        return self._facts.keep().numpy(force=force)

    def tolist(self) -> Any:
        return self.read().tolist()

    def data_ptr(self) -> int:
        return self._facts.keep().data_ptr()

    def untyped_storage(self) -> Any:
        """Who asks which tensors share memory is told so, and nothing is fetched for it."""
        return self._facts.storage() if self._facts.kept is None else self._facts.kept.untyped_storage()

    def reduced(self, x: Tensor, protocol: Any) -> Any:
        """What ``x.__reduce_ex__(protocol)`` returns, where this stands for the memory of ``x``."""
        if not isinstance(x, torch.nn.Parameter):
            return self.__reduce_ex__(protocol)
        return parameter_of_pickle(), (self, x.requires_grad, OrderedDict())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.read().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._facts.kept is not None or protocol != torch.serialization.DEFAULT_PROTOCOL:  # not torch.save's
            return self.read().__reduce_ex__(protocol)
        return reduced_late(self.shape, self.dtype, self._facts.storage())


def read_all(value: Any) -> Any:
    """``value`` with the values of every tensor; those that share memory are one."""
    read: dict[int, Tensor] = {}

    def values(x: Tensor) -> Tensor:
        if isinstance(x, Unread) and id(x.memory) not in read:
            read[id(x.memory)] = x.read()
        return read[id(x.memory)] if isinstance(x, Unread) else x

    return mapped(values, value)


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`map_tensors` that keeps what a module hangs on its state dict."""
    if type(value) is dict:
        return {key: mapped(function, x) for key, x in value.items()}
    new = map_tensors(function, value)
    if new is not value:
        hand_on_metadata(value, new)
    return new


def _real(value: Any, keep: bool) -> Any:
    if isinstance(value, Unread):
        return value._facts.keep() if keep else value.read()
    if isinstance(value, (list, tuple)):
        return type(value)([_real(x, keep) for x in value])
    return value
