"""What `functools.lru_cache` remembers, result by result."""

from __future__ import annotations

import gc
from typing import Any


class Remembered:
    """The results that a function ``cached`` by `functools.lru_cache` has.

    Those that came since can be let go, and the others stay: its own ``cache_clear`` takes all of them. What the least
    recent ones have made room for does not come back.

    Attributes:
        is_known: whether this Python's garbage collector shows them.

    Example::

        square = functools.cache(lambda x: x * x)
        square(2)
        remembered = Remembered(square)
        square(3)
        remembered.put_back()
        assert square.cache_info().currsize == 1
    """

    def __init__(self, cached: Any) -> None:
        own = getattr(cached, "__dict__", None)
        tables = [x for x in gc.get_referents(cached) if type(x) is dict and x is not own]
        self.is_known = len(tables) == 1
        self._table: dict[Any, Any] = tables[0] if self.is_known else {}
        self.note()

    def note(self) -> None:
        """They are those that there are now."""
        self._before = self._table.copy()  # whose keys are alive, so that their ids stay theirs

    def put_back(self) -> None:
        """Let go what came since."""
        known = {*map(id, self._before)}
        for key in [key for key in self._table if id(key) not in known]:
            del self._table[key]
