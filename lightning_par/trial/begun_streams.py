"""Streams of data that begin before the run, which goes on with them."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.python_state import generators


class UnrepeatableError(ValueError):
    """Looking at the first batch would change what the run gets."""

    def __init__(self, stream: Any) -> None:
        super().__init__(
            f"{type(stream).__module__}.{type(stream).__qualname__} can't be looked at before the run, as splitting "
            "the model needs: begun twice, it gives other items, and what they depend on is not in it. Write an "
            "IterableDataset whose `__iter__` draws from torch's, numpy's or Python's generator, or from one that it "
            "has as an attribute. What gives each item only once, as a queue, must be handed over as a generator; if "
            "it draws random numbers, nothing else may draw some before its first item."
        )


class Begun(IterableDataset):
    """A stream whose first iteration has begun already, and goes on with the items that it gave; later ones begin anew.

    Args:
        stream: the user's.
        iteration: of it.
    """

    def __init__(self, stream: Any, iteration: Iterator[Any]) -> None:
        self._stream = stream
        self._iteration: Iterator[Any] | None = iteration

    def __iter__(self) -> Iterator[Any]:
        return _WhenAsked(self._next_iteration)  # Lightning calls `iter` to see whether it can

    def _next_iteration(self) -> Iterator[Any]:
        iteration, self._iteration = self._iteration, None
        return iter(self._stream) if iteration is None else iteration

    def __len__(self) -> int:
        return len(self._stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stream":
            raise AttributeError(name)
        return getattr(self._stream, name)


class _WhenAsked(Iterator[Any]):
    """An iterator that is made when its first item is asked for; no generator, which would close it at its end."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make
        self._made: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return next(self._made)


class Taken:
    """Items that a stream gave before the run, which gets them as if they came then.

    Where it drew random numbers for one, the generators are put to where they stood after it, if they stand where they
    did before it. If they don't, the run is to have another item, which only a stream that can begin again gives.

    Args:
        stream: begins here. The caller keeps the generators.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._drew = stream, False
        self._stands = [generators.Standing([stream])]  # before the first item, and after each
        self._rest: Iterator[Any] = iter(stream)
        self._error: Exception | None = None
        self.items: list[Any] = []

    def take(self, count: int) -> None:
        """As many more, or as there are; what the stream raises is raised here, and again in the run."""
        try:
            for item in itertools.islice(self._rest, count):
                self._drew = self._drew or not self._stands[-1].is_met()
                self.items.append(item)
                self._stands.append(generators.Standing([self._stream]))
        except Exception as error:
            self._error = error
            raise

    def __iter__(self) -> Iterator[Any]:
        """The items, and what comes after them.

        Raises:
            UnrepeatableError: the run is to have other items, and can't.
        """
        return itertools.chain.from_iterable(self._parts())  # which does not close them, as a generator would

    def _parts(self) -> Iterator[Iterator[Any]]:
        if self._drew and not self._stands[0].is_met():
            yield self._begun_again()
            return
        yield self._given()
        if self._error is not None:
            raise self._error
        yield self._rest

    def _given(self) -> Iterator[Any]:
        for item, before, after in zip(self.items, self._stands, self._stands[1:]):
            if self._drew and not before.is_met():
                raise UnrepeatableError(self._stream)
            if self._drew:
                after.put_back()
            yield item

    def _begun_again(self) -> Iterator[Any]:
        with generators.kept([self._stream]):
            self._stands[0].put_back()
            again = iter(self._stream)
            if again is self._rest or not same(self.items, list(itertools.islice(again, len(self.items)))):
                raise UnrepeatableError(self._stream)
        return iter(self._stream)


Replaced = list[tuple[Any, Begun]]
"""Streams that have begun, and what is to take their places."""


def begin(iterable: Any, count: int) -> list[Any]:
    """The first ``count`` items of ``iterable``; generators stand where they stood."""
    with generators.kept([iterable]):
        return list(itertools.islice(iter(iterable), count))


def same(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` hold the same, as far as they can be pickled."""
    try:
        return a is b or _content(a) == _content(b)
    except Exception:
        return False


def _content(value: Any) -> bytes:
    file = io.BytesIO()
    _Contents(file).dump(value)
    return file.getvalue()


class _Contents(pickle.Pickler):
    """Pickles tensors by their entries, of whichever class: torch's own way names where their memory is."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return NotImplemented
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # made of other tensors, which come here
            return NotImplemented
        with DisableTorchFunctionSubclass():
            plain = value.detach().as_subclass(Tensor).cpu().contiguous()
        entries = raw_bytes(plain).numpy().tobytes()
        kind = () if type(value) is Tensor else (type(value), vars(value))
        return tuple, ((str(plain.dtype), tuple(plain.shape), entries, *kind),)
