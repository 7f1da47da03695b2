"""An attribute of another package's module or class that is replaced for a while."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_NOTHING = object()


class Use:
    """Whether a replacement is ``on``, or does what it replaced."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


Make = Callable[[Any, Use], Any]


class Replacement:
    """What takes the place of ``owner.name`` from `install` to `undo`.

    Someone else may replace it in between, by something that calls ours. Then that stays, and ours below it is turned
    off; a later `install` puts another one on top. Where nobody did, it is the same one each time, which code may have
    imported from there.

    Args:
        owner: a module or a class.
        name: of its attribute, its own or inherited.
        make: makes the replacement of what is there, as `inspect.getattr_static` gives it, and of its `Use`.

    Example::

        def twice(plain, use):
            return lambda x: plain(x) * (2 if use.on else 1)

        replacement = Replacement(math, "sqrt", twice)
        replacement.install()
        assert math.sqrt(4) == 4
        replacement.undo()
        assert math.sqrt(4) == 2
    """

    def __init__(self, owner: Any, name: str, make: Make) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._use = Use()
        self._plain = self._ours = self._before = _NOTHING
        self._buried: list[tuple[Any, Any]] = []  # of ours that others have, with what each replaced

    def install(self) -> None:
        """Put the replacement there; once before each `undo`."""
        self._dig_up()
        there = inspect.getattr_static(self._owner, self._name)
        if there is not self._plain:  # the first time, or someone else has put something there
            self._plain, self._use = there, Use()
            self._ours = self._make(there, self._use)
        self._use.on = True
        self._before = vars(self._owner).get(self._name, _NOTHING)
        setattr(self._owner, self._name, self._ours)

    def undo(self) -> None:
        """Put back what was there, or turn ours off where someone has put something over it."""
        self._use.on = False
        if not self._put_back(self._ours, self._before):
            self._buried.append((self._ours, self._before))

    def _dig_up(self) -> None:
        """Those below which ours was buried may have put it back: it is off, and would stay for ever."""
        self._buried = [(ours, before) for ours, before in self._buried[::-1] if not self._put_back(ours, before)][::-1]

    def _put_back(self, ours: Any, before: Any) -> bool:
        there = vars(self._owner).get(self._name, _NOTHING) is ours
        if there and before is _NOTHING:  # it was inherited
            delattr(self._owner, self._name)
        elif there:
            setattr(self._owner, self._name, before)
        return there


class Patch(Protocol):
    """A change that can be undone, and made again."""

    def install(self) -> None: ...

    def undo(self) -> None: ...


@contextlib.contextmanager
def installed(replacement: Patch) -> Iterator[None]:
    """Inside, it is."""
    replacement.install()
    try:
        yield
    finally:
        replacement.undo()


def replaced(owner: Any, name: str, make: Make) -> contextlib.AbstractContextManager[None]:
    """Inside, ``owner.name`` is what ``make`` made of it; see `Replacement`."""
    return installed(Replacement(owner, name, make))
