"""A number that a trial run guessed: arithmetic keeps in mind that it is one, and to decide by it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_par.trial.watched_number import WatchedNumber

Decide = Callable[[bool], bool]


class _Guessed(WatchedNumber):
    """A number that was read from a tensor without values."""

    decide: Decide

    def computed(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        return guessed(result, self.decide)

    def decided(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        return self.decide(result) if isinstance(result, bool) else result


class _GuessedFloat(_Guessed, float):
    pass


class _GuessedInt(_Guessed, int):
    pass


def guessed(value: Any, decide: Decide) -> Any:
    """``value`` as a number whose comparisons give ``decide(what the guessed value gives)``; True and False stay.

    Example::

        number = guessed(1.0, lambda natural: not natural)
        assert number + 1 < 0 and not number
    """
    if isinstance(value, (bool, _Guessed)) or not isinstance(value, (float, int)):
        return value
    number = _GuessedFloat(value) if isinstance(value, float) else _GuessedInt(value)
    number.decide = decide
    return number
