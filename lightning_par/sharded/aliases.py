"""Memory that one device has once and a rank twice: a view that had to be a copy, and what it was taken of.

A slice of a sharded dim, a token of a sharded sequence, the view that a function without a rule takes of a gathered
tensor: one device has views there. Each such copy is noted, and right after a function wrote into it, or into what it
was taken of, the other is written, too, so that both hold what they would on one device, and have its gradient. As
long as nobody writes in place nothing is done and nothing is sent.

What is noted hangs on the memory itself, and ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.storage import storage_of, tensor_in
from lightning_par.private.tensors import write_count
from lightning_par.sharded.functions import name_of

Axes = tuple[Axis, ...]
_ATTRIBUTE = "_lightning_par_memory"
_WRITES = "_lightning_par_writes"
_CUTS = "_lightning_par_cuts"


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
        return all(_alike(axis, held, storage.device) for axis in self.axes)

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


def _alike(axis: Axis, value: int, device: torch.device) -> bool:
    """Whether all ranks along ``axis`` say the same."""
    said = torch.tensor([value, -value], device=device)  # the largest and the smallest in one message
    high, low = axis.all_reduce_(said, "aliases", "max").tolist()
    return bool(high == -low)


def _anywhere(axes: Axes, said: bool, device: torch.device) -> bool:
    """Whether a rank along one of ``axes`` says so."""
    for axis in axes:
        said = bool(axis.all_reduce_(torch.tensor(int(said), device=device), "aliases", "max"))
    return said


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
                new = innermost(self.make(_unseen(source) if quiet or self.apart else source))
                _about_to_write(_framed(held, self.frames))
                (held.data if quiet or self.apart else held).copy_(new)

    def give(self, quiet: bool) -> None:
        """Write it into what it was taken of."""
        held, source = self.tensor(), self.source()
        if held is None or (not self._is_wanted(source is not None, held.device) if self.talks else source is None):
            return
        with self._mode():
            local = _framed(held.data if quiet or self.apart else held, self.frames)
            _about_to_write(source)
            self.put(_unseen(source) if quiet or self.apart else source, local)

    def _is_wanted(self, here: bool, device: torch.device) -> bool:
        """Whether its source is still there on any rank; else it ends to be a copy."""
        wanted = _anywhere(self.talks, here, device)
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
        if _anywhere(axes, differs, held.device):  # all ranks write, or none
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


def is_any() -> bool:
    """Whether there is anything to look after."""
    return Memory.count > 0


def is_among(xs: Sequence[Tensor]) -> bool:
    """Whether anything is known of the memory of one of the plain ``xs``."""
    return Memory.count > 0 and any(Memory.of(x) is not None for x in xs)


def note(
    name: str,
    source: Any,
    copy: Tensor,
    make: Callable[[Any], Tensor],
    put: Callable[[Any, Any], None],
    axes: Axes = (),
    root: Tensor | None = None,
    **how: Any,
) -> None:
    """``copy``, made by the function ``name``, stands for a view of ``source``.

    Args:
        name: for messages.
        source: the sharded tensor that it was taken of, or a function that returns it.
        copy: plain, or sharded.
        make: given the source, what ``copy`` should hold now, of the same kind.
        put: given the source and the copy, writes the copy into the source.
        axes: along which ``make`` talks.
        root: the tensor that ``make`` and ``put`` are about, of which ``copy`` is a view.
        how: further fields of `Copy`.
    """
    held = innermost(copy if root is None else root)
    # no values to keep equal
    if held.device.type == "meta" or isinstance(held, FakeTensor) or held.layout != torch.strided:
        return
    memory = Memory.made(held)
    if memory.copy is not None:
        return
    storage = storage_of(held)
    assert storage is not None
    form = _form(held)
    of = source if not isinstance(source, Tensor) else partial(_same, source)
    frames = () if root is not None else _frames(copy)
    memory.copy = Copy(name, of, make, put, weakref.ref(held), weakref.ref(storage), form, frames, **how)
    axes = (*axes, *memory.axes) if memory.copy.renewable else ()
    Memory.made(innermost(of())).take(memory.copy, axes)


def _about_to_write(x: Any) -> None:
    """What was gathered of a stored weight is not what it will be."""
    from lightning_par.sharded.rules import stored_weights

    if hasattr(x, "positions") and x.axis.stores:
        stored_weights.gathering_of(x).about_to_write([x])


def _unseen(source: Any) -> Any:
    """``source``, whose versions don't show what is written into this one."""
    if hasattr(source, "positions"):
        return source.data if hasattr(source, "_whole") else source.twin(_unseen(source.local))
    return None if source is None else source.data


def link(x: Any, value: Any) -> None:
    """The sharded ``x`` lies in memory of its own, where on one device it shares that of ``value``, by ``x.data``."""
    if hasattr(value, "positions"):
        make = partial(_cut_of_parts, _frames(x))
        note("data", value.twin(), x, make, _put_parts, _axes(value), apart=True, talks=_axes(x))
        return
    plain = innermost(value)
    storage = storage_of(plain)
    if storage is None or plain.device.type == "meta" or isinstance(plain, FakeTensor):
        return
    # Memory of numpy's, say, is there though no tensor holds it: this one does then.
    source = partial(_lying, weakref.ref(storage), _form(plain)) if storage.resizable() else partial(_same, plain)
    note("data", source, x, partial(_cut, _frames(x)), _put_full, apart=True, loose=True, talks=_axes(x))


def _lying(storage: weakref.ref[torch.UntypedStorage], form: tuple[Any, ...]) -> Tensor | None:
    """The tensor that lies there, if anybody else still has it."""
    memory, (dtype, *place) = storage(), form
    if memory is None:
        return None
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *place)  # type: ignore[call-overload,no-any-return]


def _cut(frames: Sequence[Any], plain: Tensor) -> Tensor:
    for _, *how in frames:
        plain = collectives.scatter(plain, *how)
    return plain


def _cut_of_parts(frames: Sequence[Any], value: Any) -> Tensor:
    return _cut(frames, gathered(value))


def _put_parts(value: Any, other: Any) -> None:
    """All ranks must call it, also where ``value`` is gone."""
    whole = gathered(other)
    if value is not None:
        innermost(value).copy_(_cut(_frames(value), whole))


def _put_full(plain: Tensor | None, part: Any) -> None:
    whole = gathered(part)
    if plain is not None:
        plain.copy_(whole)


def gathered(x: Any) -> Any:
    """The whole of a sharded ``x`` as it is, without a look at what it shares memory with."""
    while hasattr(x, "positions"):
        if hasattr(x, "_whole"):  # of a batch
            return innermost(x)
        x = collectives.gather(x.local, x.sharded_dim, x.positions, x.axis)
    return x


def _axes(x: Any) -> Axes:
    return (x.axis, *_axes(x.local)) if hasattr(x, "positions") else ()


def count_write(args: Any) -> None:
    """Called before a function writes in place into the first of ``args``."""
    x = innermost(args[0]) if args else None
    storage = storage_of(x) if isinstance(x, Tensor) else None
    if storage is not None:
        setattr(storage, _WRITES, getattr(storage, _WRITES, 0) + 1)


def keep_cut(whole: Tensor, part: Tensor, cut: Callable[[Tensor], Tensor]) -> None:
    """``part`` was cut of the plain ``whole`` and may be saved for backward, where one device saves ``whole`` itself.

    Args:
        whole: what `renew_cuts` is told of when something was written into it.
        part: plain.
        cut: makes it of what ``whole`` holds. It leads to no tensor of that memory, which keeps it, and which Python's
            garbage collector does not see through.
    """
    storage, held = storage_of(whole), storage_of(part)
    if storage is None or held is None or held is storage or part.device.type == "meta" or isinstance(part, FakeTensor):
        return
    cuts = [one for one in getattr(storage, _CUTS, ()) if one[0]() is not None]
    setattr(storage, _CUTS, [*cuts, (weakref.ref(held), _form(whole), _form(part), cut)])


def renew_cuts(x: Tensor) -> None:
    """Something was written into ``x``: parts that were cut of its memory hold what is in it now.

    Of a write that versions show a backward tells on one device; one through ``.data`` is seen by it.
    """
    storage = storage_of(innermost(x))
    for held, whole, part, cut in getattr(storage, _CUTS, ()):
        memory = held()
        if memory is not None and storage is not None:
            tensor_in(memory, *part).copy_(cut(tensor_in(storage, *whole)))


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.storage_offset(), x.size(), x.stride()


def writes_into(x: Tensor) -> int:
    """How often functions wrote into the memory of the plain ``x``, through ``.data`` too, which no version shows."""
    return getattr(storage_of(x), _WRITES, 0)


def _same(x: Any) -> Any:
    return x


def innermost(x: Any) -> Any:
    """The plain tensor that holds what this rank has of ``x``."""
    return getattr(x, "_innermost", x)


def _frames(x: Any) -> tuple[Any, ...]:
    frames = []
    while hasattr(x, "positions"):
        frames.append((type(x), x.sharded_dim, x.positions, x.axis))
        x = x.local
    return tuple(frames)


def _framed(plain: Tensor, frames: Sequence[Any]) -> Any:
    x: Any = plain
    for kind, *how in reversed(frames):
        x = kind(x, *how)
    return x


def lies_in(x: Tensor, other: Tensor) -> bool:
    """Whether ``x`` shares the memory of ``other``, or is noted as a copy of what does."""
    memory: Memory | None
    storage, at = storage_of(innermost(x)), storage_of(innermost(other))
    memory = getattr(storage, _ATTRIBUTE, None)
    while storage is not at and memory is not None and memory.copy is not None:
        source = memory.copy.source()
        storage = None if source is None else storage_of(innermost(source))
        memory = getattr(storage, _ATTRIBUTE, None)
    return storage is at and at is not None


def overlapping(xs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of the plain ``xs`` that lie at one place on one device, and here each in memory of its own."""
    found: dict[int, dict[int, tuple[float, float, Tensor]]] = {}
    for x in xs:
        memory = Memory.of(x)
        if memory is not None:
            found.setdefault(id(memory.top()), {}).setdefault(id(memory), (*memory.place(), x))
    groups: list[list[Tensor]] = []
    for members in found.values():
        end = -1.0
        for start, last, x in sorted(members.values(), key=lambda member: member[0]):
            groups = [*groups[:-1], [*groups[-1], x]] if start <= end else [*groups, [x]]
            end = max(end, last)
    return [group for group in groups if len(group) > 1]


def look(xs: Sequence[Tensor]) -> None:
    """Called before something that is no torch function of the user's uses the plain ``xs``."""
    for x in xs:
        memory = Memory.of(x)
        if memory is not None:
            memory.look()


def written(xs: Sequence[Tensor]) -> None:
    """Called after something that is no torch function of the user's wrote into the plain ``xs``, at once."""
    found = {id(memory): memory for x in xs if (memory := Memory.of(x)) is not None}
    by = [copy for memory in found.values() for copy in memory.given()]
    for top in {id(memory.top()): memory.top() for memory in found.values()}.values():
        _renew_below(top, by)


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


def _renew_below(memory: Memory, but: Sequence[Copy]) -> None:
    """All copies taken of ``memory``, and of those, hold what they should; those of ``but`` do already."""
    for copy in memory.copies():
        if all(copy is not other for other in but):
            copy.renew(False)
        if copy.memory is not None:
            _renew_below(copy.memory, but)


def settle(x: Tensor, user: Any) -> None:
    """Called before ``user``, a function, uses the plain ``x``."""
    memory = Memory.of(x)
    if memory is not None:
        memory.settle(user)
