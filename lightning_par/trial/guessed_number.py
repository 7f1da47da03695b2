"""A number that a trial run guessed: arithmetic keeps in mind that it is one, and to decide by it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Decide = Callable[[bool], bool]

_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs".split()
_DECISIONS = "lt le gt ge eq ne bool".split()


class GuessedFloat(float):
    """A float that was read from a tensor without values."""

    decide: Decide


class GuessedInt(int):
    """An int that was read from a tensor without values."""

    decide: Decide


def guessed(value: Any, decide: Decide) -> Any:
    """``value`` as a number whose comparisons give ``decide(what the guessed value gives)``; True and False stay.

    Example::

        number = guessed(1.0, lambda natural: not natural)
        assert number + 1 < 0 and not number
    """
    if isinstance(value, (bool, GuessedFloat, GuessedInt)) or not isinstance(value, (float, int)):
        return value
    number = GuessedFloat(value) if isinstance(value, float) else GuessedInt(value)
    number.decide = decide
    return number


def _arithmetic(kind: type, name: str) -> Any:
    def method(self: Any, *others: Any) -> Any:
        return guessed(getattr(kind, name)(self, *others), self.decide)

    return method


def _decision(kind: type, name: str) -> Any:
    def method(self: Any, *others: Any) -> Any:
        natural = getattr(kind, name)(self, *others)
        return natural if natural is NotImplemented else self.decide(natural)

    return method


for _kind, _plain in ((GuessedFloat, float), (GuessedInt, int)):
    for _name in _ARITHMETIC:
        setattr(_kind, f"__{_name}__", _arithmetic(_plain, f"__{_name}__"))
    for _name in _DECISIONS:
        setattr(_kind, f"__{_name}__", _decision(_plain, f"__{_name}__"))
    # It is kept, copied and hashed as the plain number.
    for _name, _method in {
        "__hash__": _plain.__hash__,
        "__deepcopy__": lambda self, memo: self,
        "__copy__": lambda self: self,
        "__reduce__": lambda self, _plain=_plain: (_plain, (_plain(repr(self)),)),
    }.items():
        setattr(_kind, _name, _method)
