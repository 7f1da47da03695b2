"""What is known of the memory of a tensor: of what it is a copy, and which copies were taken of it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.storage import storage_of, tensor_in
from lightning_par.private.tensors import write_count
from lightning_par.sharded.aliases.agreement import alike, anywhere
from lightning_par.sharded.aliases.frames import Axes, framed, innermost
from lightning_par.sharded.functions import name_of

_ATTRIBUTE = "_lightning_par_memory"


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
        setattr(storage, _ATTRIBUTE, self)
        Memory.count += 1
        Memory.made_ever += 1

    def __del__(self) -> None:
        Memory.count -= 1

    @staticmethod
    def of(x: Tensor) -> Memory | None:
        """What is known of the memory of the plain ``x``."""
        return getattr(storage_of(x), _ATTRIBUTE, None)

    @staticmethod
    def made(x: Tensor) -> Memory:
        """The same, where there may be nothing yet."""
        storage = storage_of(x)
        assert storage is not None
        return getattr(storage, _ATTRIBUTE, None) or Memory(storage)

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
            _spread(self, None, quiet)

    def _held(self) -> list[Copy]:
        return [copy for _, one in self._copies if (copy := one()) is not None]

    def _agreed(self) -> bool:
        # of ints: the same in all processes
        held = hash(tuple(number for number, one in self._copies if one() is not None))
        storage = self._storage()
        assert storage is not None
        return all(alike(axis, held, storage.device) for axis in self.axes)

    def forget(self) -> None:
        """End here, if there is nothing to know."""
        storage = self._storage()
        if storage is not None and self.copy is None and not self.axes and not self._held():
            storage.__dict__.pop(_ATTRIBUTE, None)


def _ended(memory: weakref.ref[Memory], _: Any) -> None:
    """A copy has ended. Where ranks would talk of it, all of them keep that there was one."""
    of = memory()
    if of is not None:
        of.forget()


@dataclass(eq=False)
class Copy:
    """One that stands for a view; it hangs on its own memory.

    Attributes:
        name: of the function that made it.
        source: what it was taken of, sharded or plain; None where that is gone.
        make: what the copy should hold, of the source as it is now.
        put: writes the copy into the source.
        root: the plain tensor that holds it, as long as it is there: views of it, and their gradients, follow it.
        storage: its memory.
        form: where it lies in that.
        frames: what makes a sharded tensor of the plain one.
        apart: it shares memory and no gradient, as after ``x.data = y``.
        loose: of it and its source one is a plain tensor of the user's, and what writes into that is not seen.
        talks: the axes along which ``put`` talks.
        renewable: whether it can be made anew.
    """

    name: str
    source: Callable[[], Any]
    make: Callable[[Any], Tensor]
    put: Callable[[Any, Any], None]
    root: weakref.ref[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    form: tuple[Any, ...]
    frames: tuple[Any, ...] = ()
    apart: bool = False
    loose: bool = False
    talks: Axes = ()
    renewable: bool = True

    @property
    def memory(self) -> Memory | None:
        return getattr(self.storage(), _ATTRIBUTE, None)

    def above(self) -> Memory | None:
        """The memory of what it was taken of."""
        source = self.source()
        return None if source is None else Memory.of(innermost(source))

    def tensor(self) -> Tensor | None:
        """The plain tensor that holds it, or one that shares its memory alone; None where that is gone."""
        root, storage = self.root(), self.storage()
        if storage is None or (root is not None and storage_of(root) is storage):
            return None if storage is None else root
        return tensor_in(storage, *self.form)

    def renew(self, quiet: bool) -> None:
        """Write into it what it should hold; ``quiet``: unseen by versions, as through ``.data``."""
        if not self.renewable:
            self.spoil("whose gradient goes to a weight")
            return
        held, source = self.tensor(), self.source()
        if held is not None and source is not None:
            with self._mode():
                new = innermost(self.make(unseen(source) if quiet or self.apart else source))
                _about_to_write(framed(held, self.frames))
                (held.data if quiet or self.apart else held).copy_(new)

    def give(self, quiet: bool) -> None:
        """Write it into what it was taken of."""
        held, source = self.tensor(), self.source()
        if held is None or (not self._is_wanted(source is not None, held.device) if self.talks else source is None):
            return
        with self._mode():
            local = framed(held.data if quiet or self.apart else held, self.frames)
            _about_to_write(source)
            self.put(unseen(source) if quiet or self.apart else source, local)

    def _is_wanted(self, here: bool, device: torch.device) -> bool:
        """Whether its source is still there on any rank; else it ends to be a copy."""
        wanted = anywhere(self.talks, here, device)
        memory = self.memory
        if not wanted and memory is not None:
            memory.copy = None
            memory.forget()
        return wanted

    def look(self) -> None:
        """Somebody may have written into the plain one of it and its source: then the other is written, too."""
        held, source, memory = self.tensor(), self.source(), self.memory
        if held is None or source is None or memory is None:
            return
        down = not hasattr(source, "positions")
        above = self.above()
        assert above is not None
        axes = (memory if down else above).axes
        new, old = (self.make(source), held) if down else (source.part_of(held), source)
        with torch.no_grad():
            differs = not torch.equal(innermost(new).detach(), innermost(old).detach())
        if anywhere(axes, differs, held.device):  # all ranks write, or none
            self.renew(True) if down else self.give(True)
            _spread(memory if down else above, self, True)

    def spoil(self, why: str) -> None:
        """What should be in it isn't, and can't be."""
        memory = self.memory
        if memory is not None:
            memory.stale = (
                f"`{self.name}` made it where one device has a view, {why}, and then something was written in place "
                "into what it was taken of. Take it anew after the write, or write `x = x * 2` in place of `x *= 2`"
            )

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad() if self.apart else contextlib.nullcontext()


def _about_to_write(x: Any) -> None:
    """What was gathered of a stored weight is not what it will be."""
    from lightning_par.sharded.rules import stored_weights

    if hasattr(x, "positions") and x.axis.stores:
        stored_weights.gathering_of(x).about_to_write([x])


def unseen(source: Any) -> Any:
    """``source``, whose versions don't show what is written into this one."""
    if hasattr(source, "positions"):
        return source.data if hasattr(source, "_whole") else source.twin(unseen(source.local))
    return None if source is None else source.data


def _spread(memory: Memory, by: Copy | None, quiet: bool) -> None:
    """Into all that shares ``memory`` on one device goes what is in it; ``by`` has it."""
    copy = memory.copy
    if copy is not None and copy is not by:
        copy.give(quiet)
        above = copy.above()
        if above is not None:
            _spread(above, copy, quiet)
    for other in memory.copies():
        below = other.memory
        if other is not by and below is not None:
            other.renew(quiet)
            _spread(below, other, quiet)
