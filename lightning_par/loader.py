"""A loader's first batch, read beside its own iteration."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_par import generators


class NoBatchError(Exception):
    """The loader is empty, or its first batch can't be had without taking it away from the run."""


class Chained(IterableDataset):
    """An iterator that can't be iterated anew, with what was taken from it in front again.

    Where ``iter()`` does begin anew, which shows in the first item coming again, nothing is put in front.
    """

    def __init__(self, iterator: Any, taken: list[Any]) -> None:
        self._iterator = iterator
        self._taken = taken

    def __iter__(self) -> Iterator[Any]:
        taken, self._taken = self._taken, []
        rest = iter(self._iterator)
        for first in itertools.islice(rest, 1):
            if taken and not _same(first, taken[0]):
                yield from taken
            taken = []
            yield first
        yield from taken
        yield from rest

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)


def first_batch(loader: Any, may_consume: bool) -> tuple[Any, tuple[Any, Chained] | None]:
    """The first batch of ``loader``, and, where an iterator had to give something away for it, that iterator with its
    replacement. The caller keeps the generators of random numbers.

    Raises:
        NoBatchError: there is none, or only by consuming, and ``may_consume`` is False.
        Exception: whatever the user's dataset raises.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        items, consumed = _take(loader, 1, may_consume)
        return items[0], consumed
    if not isinstance(loader.dataset, IterableDataset):
        return _first_of_map(loader), None
    try:
        return _first_of_stream(loader, may_consume and loader.num_workers == 0)
    except NoBatchError:
        if loader.num_workers == 0:
            raise
        return _first_through_workers(loader), None


def _first_of_map(loader: DataLoader[Any]) -> Any:
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    kept = [loader.dataset, *generators.find([sampler])]  # shared with the copy: large, or restored anyway
    try:
        for index in _copied(sampler, {id(x): x for x in kept}):
            return _fetch(loader, index)
    except Exception:
        if loader.num_workers == 0:
            raise
        return _first_through_workers(loader)  # the dataset may need what `worker_init_fn` sets up
    raise NoBatchError


def _fetch(loader: DataLoader[Any], index: Any) -> Any:
    dataset: Any = _shallow(loader.dataset)
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[index])
    if getattr(dataset, "__getitems__", None):
        return loader.collate_fn(dataset.__getitems__(index))
    return loader.collate_fn([dataset[i] for i in index])


def _first_of_stream(loader: DataLoader[Any], may_consume: bool) -> tuple[Any, tuple[Any, Chained] | None]:
    size = loader.batch_size
    items, consumed = _take(loader.dataset, size or 1, may_consume)
    if size is not None and loader.drop_last and len(items) < size:
        raise NoBatchError
    return loader.collate_fn(items[0] if size is None else items), consumed


def _first_through_workers(loader: DataLoader[Any]) -> Any:
    for batch in copy.copy(loader):  # the copy keeps persistent workers to itself
        return batch
    raise NoBatchError


def _take(iterable: Any, count: int, may_consume: bool) -> tuple[list[Any], tuple[Any, Chained] | None]:
    """Up to ``count`` items, at least one; and the iterator that lost them, with its replacement.

    Whether iterating consumes can't be seen from outside (``__iter__`` may hand out a stored generator), so it is
    tried: a second iteration that doesn't begin with the same items shows it.
    """
    if not may_consume:
        return _at_least_one(_begin(_deep(iterable), count)), None
    items = _begin(_shallow(iterable), count)
    one_shot = isinstance(iterable, Iterator) and _shallow(iterable) is iterable
    again = [] if one_shot else _begin(_shallow(iterable), count)
    consumed = None if not one_shot and _same(items, again) else (iterable, Chained(iterable, items + again))
    return _at_least_one(items), consumed


def _begin(iterable: Any, count: int) -> list[Any]:
    with generators.kept([iterable]):
        return list(itertools.islice(iter(iterable), count))


def _at_least_one(items: list[Any]) -> list[Any]:
    if not items:
        raise NoBatchError
    return items


def _shallow(value: Any) -> Any:
    """A copy, whose position or late-opened file is its own; the original where copying is not safe."""
    if hasattr(type(value), "__del__"):  # it may close what the original still needs
        return value
    try:
        return copy.copy(value)
    except Exception:  # copying runs the object's own methods, which raise what they like
        return value


def _deep(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a generator or an open file is in it
        raise NoBatchError from None


def _copied(value: Any, shared: dict[int, Any]) -> Any:
    """A deep copy that shares the objects ``shared`` (by id) with the original; the original where that fails."""
    try:
        return copy.deepcopy(value, shared)
    except Exception:
        return value


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or _content(a) == _content(b)
    except Exception:
        return False


def _content(value: Any) -> bytes:
    file = io.BytesIO()
    _Contents(file).dump(value)
    return file.getvalue()


class _Contents(pickle.Pickler):
    """Pickles tensors by their entries: torch's own way names where their memory is."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided:
            return NotImplemented
        entries = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), entries),)
