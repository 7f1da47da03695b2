"""A loader's first batch, read beside its own iteration."""

from __future__ import annotations

import copy
import io
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.queues
import socket
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.private.tensors import write_count
from lightning_par.python_state import generators
from lightning_par.python_state.find_objects import find_objects
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.spare_tensors import Spares
from lightning_par.trial.begun_streams import Begun, Replaced, Taken, UnrepeatableError, begin, same
from lightning_par.trial.stream_copy import copy_of

_QUEUES = (multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue, multiprocessing.connection.Connection)
_FILES = (
    multiprocessing.managers.BaseProxy,
    io.FileIO,
    io.BufferedReader,
    io.BufferedRandom,
    io.TextIOWrapper,
    socket.socket,
)


class NoBatchError(Exception):
    """The loader is empty, or its first batch can't be had without taking it away from the run."""


def first_batch(loader: Any, may_begin: bool, begun: Replaced) -> Any:
    """The first batch of ``loader``. The caller keeps the generators of random numbers.

    Args:
        loader: the user's.
        may_begin: whether another can take the place of a stream that had to begin for it.
        begun: gets those that did.

    Raises:
        NoBatchError: there is none, or only by beginning.
        UnrepeatableError: looking changes what the run gets.
        Exception: whatever the user's dataset raises.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return _take(loader, 1, may_begin, begun)[0]
    if not isinstance(loader.dataset, IterableDataset):
        return _first_of_map(loader)
    if loader.num_workers == 0:
        return _first_of_stream(loader, may_begin, begun)
    return _first_of_workers_stream(loader)


def _first_of_map(loader: DataLoader[Any]) -> Any:
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    kept = [loader.dataset, *generators.find([sampler])]  # shared with the copy: large, or restored anyway
    try:
        for index in _indices(sampler, {id(x): x for x in kept}):
            return _fetch(loader, index)
    except UnrepeatableError:
        raise
    except Exception:
        if loader.num_workers == 0:
            raise
        return _first_through_workers(loader)  # the dataset may need what `worker_init_fn` sets up
    raise NoBatchError


def _fetch(loader: DataLoader[Any], index: Any) -> Any:
    dataset: Any = _shallow(loader.dataset)
    if loader.batch_sampler is None:
        return _collated(loader, dataset[index])
    if getattr(dataset, "__getitems__", None):
        return _collated(loader, dataset.__getitems__(index))
    return _collated(loader, [dataset[i] for i in index])


def _collated(loader: DataLoader[Any], items: Any) -> Any:
    """As the loader does. What its function changes is put back: the run calls it again for this batch."""
    state = Snapshot([])
    state.add("collate_fn", loader.collate_fn)
    state.lend(Spares())
    try:
        return loader.collate_fn(items)
    finally:
        state.restore()


def _first_of_stream(loader: DataLoader[Any], may_begin: bool, begun: Replaced) -> Any:
    size = loader.batch_size
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # its seed for workers, drawn ahead
    items = _take(loader.dataset, size or 1, may_begin, begun)
    if size is not None and loader.drop_last and len(items) < size:
        raise NoBatchError
    return _collated(loader, items[0] if size is None else items)


def _first_of_workers_stream(loader: DataLoader[Any]) -> Any:
    if find_objects([loader.dataset], _QUEUES):  # workers would take from them what the run is to get
        raise UnrepeatableError(loader.dataset)
    batch = _first_through_workers(loader)
    if find_objects([loader.dataset], _FILES):  # all processes read on from the same place of an open file
        try:
            again = _first_through_workers(loader)
        except NoBatchError:
            again = None
        if not same(batch, again):
            raise UnrepeatableError(loader.dataset)
    return batch


def _first_through_workers(loader: DataLoader[Any]) -> Any:
    with generators.kept([loader]):
        for batch in copy.copy(loader):  # the copy keeps persistent workers to itself
            return batch
    raise NoBatchError


def _take(stream: Any, count: int, may_begin: bool, begun: Replaced) -> list[Any]:
    """Up to ``count`` items, at least one.

    A stream is begun on copies; that two of them give the same shows that nothing outside of it has changed. One that
    can't be copied begins itself, and goes on in the run.
    """
    copied = copy_of(stream)
    if copied is not None:
        tensors = find_objects([stream], (Tensor,))  # large ones are not copied
        versions = [write_count(x) for x in tensors]
        items = begin(copied, count)
        if not same(items, begin(copy_of(stream), count)) or versions != [write_count(x) for x in tensors]:
            raise UnrepeatableError(stream)
    elif not may_begin:
        raise NoBatchError
    else:
        items = _begin_itself(stream, count, begun)
    if not items:
        raise NoBatchError
    return items


def _begin_itself(stream: Any, count: int, begun: Replaced) -> list[Any]:
    with generators.kept([stream]):
        taken = Taken(stream)
        begun.append((stream, Begun(stream, iter(taken))))
        taken.take(count)
    return taken.items


def _shallow(value: Any) -> Any:
    """A copy, whose position or late-opened file is its own; the original where copying is not safe."""
    if hasattr(type(value), "__del__"):  # it may close what the original still needs
        return value
    try:
        return copy.copy(value)
    except Exception:  # copying runs the object's own methods, which raise what they like
        return value


def _indices(sampler: Any, shared: dict[int, Any]) -> Any:
    """What ``sampler`` gives, of a deep copy that shares the objects ``shared`` (by id) with it; of itself where that
    fails."""
    try:
        return copy.deepcopy(sampler, shared)
    except Exception:
        if not same(begin(sampler, 1), begin(sampler, 1)):
            raise UnrepeatableError(sampler) from None
        return sampler
