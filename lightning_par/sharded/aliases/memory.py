"""What is known of the memory of a tensor: of what it is a copy, and which copies were taken of it."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.private.storage import storage_of
from lightning_par.private.tensors import write_count
from lightning_par.sharded.aliases.agreement import alike
from lightning_par.sharded.aliases.frames import Axes, innermost
from lightning_par.sharded.functions import name_of

if TYPE_CHECKING:
    from lightning_par.sharded.aliases.view_copy import Copy

ATTRIBUTE = "_lightning_par_memory"
"""Of storages: their `Memory`."""


class Memory:
    """What is known of the memory of plain tensors.

    Attributes:
        copy: the copy that this memory is, or None.
        axes: along which ranks talk to make anew a copy that was taken of it, or of such a copy.
        stale: why it does not hold what it should, or None.
    """

    count = 0
    made_ever = 0

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.copy: Copy | None = None
        self.axes: Axes = ()
        self.stale: str | None = None
        self._storage = weakref.ref(storage)
        self._copies: list[tuple[int, weakref.ref[Copy]]] = []  # taken of it, numbered alike on all ranks
        self._taken = 0
        self._told: tuple[Any, int | None] | None = None  # of the last write: the tensor, and its version
        setattr(storage, ATTRIBUTE, self)
        Memory.count += 1
        Memory.made_ever += 1

    def __del__(self) -> None:
        Memory.count -= 1

    @staticmethod
    def of(x: Tensor) -> Memory | None:
        """What is known of the memory of the plain ``x``."""
        return getattr(storage_of(x), ATTRIBUTE, None)

    @staticmethod
    def made(x: Tensor) -> Memory:
        """The same, where there may be nothing yet."""
        storage = storage_of(x)
        assert storage is not None
        return getattr(storage, ATTRIBUTE, None) or Memory(storage)

    def take(self, copy: Copy, axes: Axes) -> None:
        """``copy`` was taken of it."""
        self._taken += 1
        self._copies.append((self._taken, weakref.ref(copy, partial(_ended, weakref.ref(self)))))
        # A write into any of those above makes it anew, and for that all ranks along these axes must come.
        memory: Memory | None = self
        while memory is not None and axes:
            memory.axes = (*memory.axes, *(axis for axis in axes if all(axis is not other for other in memory.axes)))
            memory = None if memory.copy is None else memory.copy.above()

    def copies(self) -> list[Copy]:
        """Those taken of it that somebody holds; where it has `axes`, all ranks along them must call it.

        What the code of one rank alone holds can't be made anew, since the others take no part in it.
        """
        if self.axes and not self._agreed():
            gc.collect()  # a cycle may hold a copy on one rank until its collector runs
            if not self._agreed():
                for copy in self._held():
                    copy.spoil("which is held on some ranks alone")
                return []
        found = self._held()
        self._copies = [(number, one) for number, one in self._copies if one() is not None]
        if not found:
            self.axes = ()
            self.forget()
        return found

    def tensor(self) -> Tensor | None:
        """One whose version tells of all writes but those through ``.data`` of another."""
        if self.copy is not None:
            return self.copy.root()
        source = next((copy.source() for copy in self._held()), None)
        return None if source is None else innermost(source)

    def top(self) -> Memory:
        """Of what the first copy was taken."""
        above = None if self.copy is None else self.copy.above()
        return self if above is None else above.top()

    def place(self) -> tuple[float, float]:
        """From which to which entry of what the first copy was taken of it lies, if that is known."""
        source = None if self.copy is None or not self.copy.loose else self.copy.source()
        if source is None or hasattr(source, "positions"):
            return 0.0, float("inf")
        start = source.storage_offset()
        return start, start + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride()))

    def given(self) -> list[Copy]:
        """Written into what it was taken of, and that into what that was; returns those that were."""
        copy = self.copy
        if copy is None:
            return []
        copy.give(False)
        above = copy.above()
        return [copy, *([] if above is None else above.given())]

    def settle(self, user: Any) -> None:
        """Called before ``user``, a function, uses this memory.

        Raises:
            RuntimeError: it does not hold what it should.
        """
        if self.stale is not None:
            from lightning_par.sharded.rules.gather_report import user_line

            raise RuntimeError(f"`{name_of(user)}` at {user_line()} uses a copy that is out of date: {self.stale}.")
        self.look()

    def look(self) -> None:
        """Write into it what was written, unseen, into plain tensors that share it."""
        for copy in (*([] if self.copy is None else [self.copy]), *self._held()):
            if copy.loose:
                copy.look()

    def written(self, x: Tensor, quiet: bool = False) -> None:
        """Something wrote into it through the plain ``x``: what shares it on one device is written, too.

        Args:
            x: lies in it.
            quiet: whether its version does not show it, as through ``.data``.
        """
        version = None if x.is_inference() else write_count(x)
        told = self._told
        # unless it was told of this write already
        if told is None or told[0]() is not x or told[1] != version or version is None:
            self._told = weakref.ref(x), version
            spread(self, None, quiet)

    def _held(self) -> list[Copy]:
        return [copy for _, one in self._copies if (copy := one()) is not None]

    def _agreed(self) -> bool:
        # of ints: the same in all processes
        held = hash(tuple(number for number, one in self._copies if one() is not None))
        storage = self._storage()
        assert storage is not None
        device = torch.device("cpu") if storage.device.type == "meta" else storage.device  # of what has no values
        return all(alike(axis, held, device) for axis in self.axes)

    def forget(self) -> None:
        """End here, if there is nothing to know."""
        storage = self._storage()
        if storage is not None and self.copy is None and not self.axes and not self._held():
            storage.__dict__.pop(ATTRIBUTE, None)


def _ended(memory: weakref.ref[Memory], _: Any) -> None:
    """A copy has ended. Where ranks would talk of it, all of them keep that there was one."""
    of = memory()
    if of is not None:
        of.forget()


def spread(memory: Memory, by: Copy | None, quiet: bool) -> None:
    """Into all that shares ``memory`` on one device goes what is in it; ``by`` has it."""
    copy = memory.copy
    if copy is not None and copy is not by:
        copy.give(quiet)
        above = copy.above()
        if above is not None:
            spread(above, copy, quiet)
    for other in memory.copies():
        below = other.memory
        if other is not by and below is not None:
            other.renew(quiet)
            spread(below, other, quiet)
