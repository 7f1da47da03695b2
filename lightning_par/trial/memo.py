"""What was found out once of code, functions and shapes, and holds whenever it is asked for again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A module's memo: the one kind of table that outlives a run, since what it holds is of no run.

    Keys and values are functions, types, shapes and what follows from them; never a module, a parameter, or a result of
    a user's step. Where a function's arguments are the key, and can be hashed, `functools.lru_cache` is a memo, too.

    Args:
        make: makes the value of a key that is asked for; without it, values are set.
        most: entries. With one more all are forgotten: users make functions and classes without end.

    Example::

        length = Memo(len)
        assert length["abc"] == 3
    """

    __slots__ = ("_make", "_most")

    def __init__(self, make: Callable[[K], V] | None = None, most: int = 4096) -> None:
        super().__init__()
        self._make, self._most = make, most

    def __missing__(self, key: K) -> V:
        if self._make is None:
            raise KeyError(key)
        value = self._make(key)
        self[key] = value
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most and key not in self:
            self.clear()
        super().__setitem__(key, value)
