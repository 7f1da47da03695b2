"""Arrays and tensors that are too large, or too many, to be copied for every run of a step: it may read them alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.private.storage import memory_of
from lightning_par.python_state.lent_tensors import ITEMS, SMALL
from lightning_par.python_state.tensor_writes import version_of
from lightning_par.sharded.run_state import RunState

if TYPE_CHECKING:
    from lightning_par.python_state.snapshot import Snapshot

_MOST = 8  # names in a message


class ReadOnly:
    """What of ``states`` a run may read alone where it meets it as an array of numpy: no version counts what is written
    into an array of a tensor, nor into a tensor of an array.

    Args:
        states: as they are lent to the run.
        copies: whether that goes for tensors, too, of which the run has copies.
    """

    def __init__(self, states: Sequence[Snapshot], copies: bool) -> None:
        self._states, self._copies = states, copies
        self._arrays = [found for state in states for found in state.locked()]
        self._by_id: dict[int, str] = {}
        self._memories: dict[Any, str] | None = None
        self._tensors: list[tuple[str, Tensor, int]] = []

    @property
    def names(self) -> list[str]:
        """Of the arrays."""
        return [*dict.fromkeys(name for name, _ in self._arrays)]

    def array_of(self, x: Tensor, array: np.ndarray[Any, Any]) -> None:
        """A run has got an ``array`` of ``x``."""
        if self._memories is None:
            self._memories = dict(self._by_memory())
        name = self._memories.get(memory_of(x)) if self._memories else None
        if name is not None and not array.flags.owndata:
            array.flags.writeable = False
            self._arrays.append((name, array))

    def tensor_of(self, array: Any, x: Tensor) -> None:
        """A run has got a tensor ``x`` of the memory of an ``array``."""
        if len(self._by_id) < len(self._arrays):
            self._by_id = {id(x): name for name, x in self._arrays}
        while isinstance(array, np.ndarray):  # by views, to what they are of
            if id(array) in self._by_id:
                self._tensors.append((self._by_id[id(array)], x, version_of(x)))
                return
            array = array.base

    def written(self) -> list[str]:
        """The names of arrays that were written by tensors of their memory."""
        return [*dict.fromkeys(name for name, x, version in self._tensors if version_of(x) != version)]

    def _by_memory(self) -> Iterator[tuple[Any, str]]:
        for state in self._states:
            for held in state.tensors.values():
                lent = [cell.lent[key][0] for cell, key in held.slots if key in cell.lent]
                watched = [cell.place(key) for cell, key in held.slots if key in cell.lent or key in cell.versions]
                if watched and (self._copies or not lent):
                    yield memory_of(lent[0] if lent else held.tensor), watched[0]


class _SharedTensors(TorchFunctionMode):
    """Hears of tensors that torch's functions make in an array's memory, where they need no copy."""

    def __init__(self, arrays: ReadOnly) -> None:
        super().__init__()
        self._arrays = arrays

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **(kwargs or {}))
        if func in (torch.as_tensor, torch.asarray) and type(x) is Tensor and x.device.type == "cpu":
            given = args[0] if args else (kwargs or {}).get("data", (kwargs or {}).get("obj"))
            if isinstance(given, np.ndarray) and np.shares_memory(given, x.detach().numpy()):
                self._arrays.tensor_of(given, x)
        return x


@contextlib.contextmanager
def reading(states: Sequence[Snapshot], copies: bool = False) -> Iterator[None]:
    """A run may read what is `ReadOnly` of ``states``.

    Raises:
        RuntimeError: it has written into it.
    """
    state, arrays = RunState.current, ReadOnly(states, copies)
    before, state.read_only = state.read_only, arrays
    with contextlib.ExitStack() as stack:
        if arrays.names:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            stack.enter_context(_SharedTensors(arrays))
        try:
            yield
        except ValueError as error:
            if "read-only" in str(error) and arrays.names:
                raise RuntimeError(_shared(arrays.names)) from error
            raise
        finally:
            state.read_only = before
    if written := arrays.written():
        raise RuntimeError(_shared(written))


def _shared(places: list[str]) -> str:
    return (
        f"The step writes into an array of numpy, or a tensor of one, that its runs may only read: {_listed(places)}. "
        "It runs several times, and nothing tells what it writes so. Write into a tensor, as `self.x[i] = v`, that is "
        f"a buffer or has up to {SMALL:,} entries, or assign a new array."
    )


def not_copied(places: list[str]) -> str:
    """What the user is told of state that is not copied."""
    return (
        f"The step changes a tensor or array in place of which its runs have no copies: {_listed(places)}. They have "
        f"copies of buffers, of other tensors and arrays of up to {SMALL:,} entries, and of tensors in lists and dicts "
        f"of up to {ITEMS} items. Register it as a buffer, or assign a new one."
    )


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - _MOST} more" if len(places) > _MOST else ""
    return ", ".join(places[:_MOST]) + more
