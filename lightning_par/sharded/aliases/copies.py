"""Notes that a tensor stands for a view of another, and tells both of what is written into one of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_par.private.storage import storage_of
from lightning_par.sharded.aliases.frames import Axes, axes_of, form_of, frames_of, innermost, is_followed
from lightning_par.sharded.aliases.memory import Memory
from lightning_par.sharded.aliases.view_copy import Copy


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
    if not is_followed(held, (*axes, *axes_of(source), *axes_of(copy))):
        return
    memory = Memory.made(held)
    if memory.copy is not None:
        return
    storage = storage_of(held)
    assert storage is not None
    form = form_of(held)
    of = source if not isinstance(source, Tensor) else partial(same, source)
    frames = () if root is not None else frames_of(copy)
    memory.copy = Copy(name, of, make, put, weakref.ref(held), weakref.ref(storage), form, frames, **how)
    memory.copy.settled()
    axes = (*axes, *memory.axes) if memory.copy.renewable else ()
    Memory.made(innermost(of())).take(memory.copy, axes)


def same(x: Any) -> Any:
    """``x``; by `functools.partial` a source that is held."""
    return x


def settle(x: Tensor, user: Any) -> None:
    """Called before ``user``, a function, uses the plain ``x``."""
    memory = Memory.of(x)
    if memory is not None:
        memory.settle(user)


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


def _renew_below(memory: Memory, but: Sequence[Copy]) -> None:
    """All copies taken of ``memory``, and of those, hold what they should; those of ``but`` do already."""
    for copy in memory.copies():
        if all(copy is not other for other in but):
            copy.renew(False)
        if copy.memory is not None:
            _renew_below(copy.memory, but)
