"""A number in a trial run that says what is computed of it, and what is decided by it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

_BINARY = "add sub mul truediv floordiv mod pow"
_COMPARISONS = "lt le gt ge eq ne"
_UNARY = (operator.neg, operator.pos, operator.abs, round, math.floor, math.ceil, math.trunc)


class WatchedNumber:
    """To be mixed into a class of numbers, before int or float. To others it is the plain number; so are pickles of it.

    What a number on its left makes of it that computes by itself is plain, too: numpy's, and a float of an int. Nothing
    tells what an int counts, as in ``range(n)``.

    Example::

        class Loud(WatchedNumber, float):
            def decided(self, result, function, numbers):
                print("somebody decides by it")
                return result

        assert Loud(2.0) > 1
    """

    def computed(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        """What the user's code has of a computation.

        Args:
            result: of the plain numbers.
            function: which gave it.
            numbers: its arguments, watched ones among them.
        """
        return result

    def decided(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        """What the user's code has of a comparison, of ``bool``, and of a whole number made of a float, as no one sees
        what that counts; arguments as for `computed`."""
        return result

    def __bool__(self) -> bool:
        return bool(self.decided(bool(plain_number(self)), bool, (self,)))

    def __int__(self) -> int:
        result = int(plain_number(self))
        return int(self.decided(result, int, (self,))) if isinstance(self, float) else result

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other  # type: ignore[operator]

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __hash__(self) -> int:
        return hash(plain_number(self))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(plain_number(self)), (plain_number(self),)


def plain_number(x: Any) -> Any:
    """An int or a float without what a subclass adds; anything else as it is.

    Example::

        assert type(plain_number(numpy.float64(2.0))) is float
    """
    return float.__float__(x) if isinstance(x, float) else int.__int__(x) if isinstance(x, int) else x


def _binary(function: Callable[..., Any], decides: bool) -> Any:
    def method(self: Any, *others: Any) -> Any:  # of `pow`, the modulus, too
        if not all(isinstance(x, (int, float)) for x in others):
            return NotImplemented
        result = function(plain_number(self), *map(plain_number, others))
        return (self.decided if decides else self.computed)(result, function, (self, *others))

    return method


def _unary(function: Callable[..., Any]) -> Any:
    def method(self: Any, *others: Any) -> Any:  # of `round`, the digits
        result = function(plain_number(self), *others)
        counts = isinstance(self, float) and isinstance(result, int)
        return (self.decided if counts else self.computed)(result, function, (self, *others))

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, other: function(other, x)


for _name in _COMPARISONS.split():
    setattr(WatchedNumber, f"__{_name}__", _binary(getattr(operator, _name), decides=True))
for _name in _BINARY.split():
    _function = pow if _name == "pow" else getattr(operator, _name)  # which takes a modulus
    setattr(WatchedNumber, f"__{_name}__", _binary(_function, decides=False))
    setattr(WatchedNumber, f"__r{_name}__", _binary(_reflected(_function), decides=False))
for _function in _UNARY:
    setattr(WatchedNumber, f"__{_function.__name__}__", _unary(_function))
