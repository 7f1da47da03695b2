"""What was found out of units by trying them, for those that are alike: layers, many of which hold their own number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Found = TypeVar("_Found")


class TriedUnits(Generic[_Found]):
    """What was found of units, by what they are.

    Units that differ in ``places`` alone, as layers do that know their number, or are given a cache that grows from
    layer to layer, count as alike where others did so before: several with as many different values in those places
    were each tried, and came to the same. What was the same in all of them tells units apart, as a size does. (That is
    a belief, of code that goes by the number of its layer and by the size of the batch at once. The first step is
    compared with that of the whole batch, whatever units do.)

    Example::

        tried = TriedUnits[bool]()
        tried.keep("block", (64, 0), True)
        tried.keep("block", (64, 1), True)
        assert tried.find("block", (64, 2)) is True and tried.find("block", (32, 2)) is None
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[tuple[Hashable, ...], _Found]] = {}

    def find(self, words: Hashable, places: tuple[Hashable, ...]) -> _Found | None:
        """What was found of units like that of these ``words`` and ``places``; None where it is to be tried."""
        known = self._found.get(words, {})
        if places in known:
            return known[places]
        found = [*known.values()]
        if len(found) < 2 or any(other != found[0] for other in found):
            return None
        seen = [set(of_place) for of_place in zip(*known)]
        return found[0] if all(len(s) == len(known) or s == {x} for s, x in zip(seen, places)) else None

    def keep(self, words: Hashable, places: tuple[Hashable, ...], found: _Found) -> None:
        """A unit of these ``words`` and ``places`` was tried."""
        self._found.setdefault(words, {})[places] = found
