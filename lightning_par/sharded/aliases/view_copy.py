"""A copy that stands for what is a view on one device: written where that is written, and the other way round."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.storage import storage_of, tensor_in
from lightning_par.sharded.aliases.agreement import anywhere
from lightning_par.sharded.aliases.frames import Axes, framed, innermost
from lightning_par.sharded.aliases.memory import ATTRIBUTE, Memory, spread
from lightning_par.trial.known_values import times_written


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
        written: how often functions had written into it and its source when they were equal last; of what has no
            values.
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
    written: int = 0

    @property
    def memory(self) -> Memory | None:
        return getattr(self.storage(), ATTRIBUTE, None)

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

    def settled(self) -> None:
        """It holds now what it should."""
        held, source = self.tensor(), self.source()
        if isinstance(held, FakeTensor):
            self.written = _times_written(held, source)

    def renew(self, quiet: bool) -> None:
        """Write into it what it should hold; ``quiet``: unseen by versions, as through ``.data``."""
        if not self.renewable:
            self.spoil("whose gradient goes to a weight")
            return
        held, source = self.tensor(), self.source()
        if held is not None and source is not None:
            with self._mode():
                new = innermost(self.make(unseen(source) if quiet or self.apart else source))
                _about_to_write(framed(held, self.frames), [])
                (held.data if quiet or self.apart else held).copy_(new)
                self.settled()

    def give(self, quiet: bool) -> None:
        """Write it into what it was taken of."""
        held, source = self.tensor(), self.source()
        if held is None or (not self._is_wanted(source is not None, held.device) if self.talks else source is None):
            return
        with self._mode():
            local = framed(held.data if quiet or self.apart else held, self.frames)
            _about_to_write(source, [held.detach()])
            self.put(unseen(source) if quiet or self.apart else source, local)
            self.settled()

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
            differs = self._differs(held, source, innermost(new).detach(), innermost(old).detach())
        if anywhere(axes, differs, held.device):  # all ranks write, or none
            self.renew(True) if down else self.give(True)
            spread(memory if down else above, self, True)

    def _differs(self, held: Tensor, source: Any, new: Tensor, old: Tensor) -> bool:
        if not any(isinstance(x, FakeTensor) for x in (new, old)):
            return not torch.equal(new, old)
        return self.written != _times_written(held, source)

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


def _about_to_write(x: Any, given: list[Tensor]) -> None:
    """What was gathered of a stored weight is not what it will be, which is made of what is ``given``."""
    from lightning_par.sharded.rules import stored_weights

    if hasattr(x, "positions") and x.axis.stores:
        stored_weights.gathering_of(x).about_to_write([x], given)


def _times_written(held: Tensor, source: Any) -> int:
    return times_written(held) + (0 if source is None else times_written(innermost(source)))


def unseen(source: Any) -> Any:
    """``source``, whose versions don't show what is written into this one."""
    if hasattr(source, "positions"):
        return source.data if hasattr(source, "_whole") else source.twin(unseen(source.local))
    return None if source is None else source.data
