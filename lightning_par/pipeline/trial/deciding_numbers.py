"""Plain numbers by which a unit may decide what it does: attributes, and arguments as in ``layer(x, step=step)``.

In a trial a watched number stands for each, and what is computed of it is one, too. What is decided by it is noted, as
a question: a dry run asks it of the numbers that it meets, and where the answers are the same, the unit's code goes the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_par.trial.watched_number import WatchedNumber, plain_number

Place = int | str
"""Of an argument, its index or keyword; or an attribute's name."""
Question = Callable[[Mapping[Place, Any]], Any]
"""Of the numbers at their places."""
Notice = Callable[[frozenset[Place], Question], None]
"""Called with the places of the numbers that something is decided by, and the question that decides it."""
Asked = tuple[Question, ...]
Questions = dict[frozenset[Place], list[Question]]
"""By the places of the numbers."""

_KINDS = (int, float)
_MOST = 100  # questions about the same numbers; a loop may ask more than anyone needs to know


class _Deciding(WatchedNumber):
    """A number that comes of numbers at certain places.

    Attributes:
        origins: these places, by who is to be told of what is decided.
        value: what it is.
    """

    origins: Mapping[Notice, frozenset[Place]]
    value: Question

    def computed(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        return _watch(result, _origins(numbers), _question(function, numbers))

    def decided(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        question = _question(function, numbers)
        for notice, places in _origins(numbers).items():
            notice(places, question)
        return result


class _Int(_Deciding, int):
    pass


class _Float(_Deciding, float):
    pass


def _watch(value: Any, origins: Mapping[Notice, frozenset[Place]], question: Question) -> Any:
    if type(value) not in _KINDS:
        return value
    number = _Int(value) if type(value) is int else _Float(value)
    number.origins, number.value = origins, question
    return number


def _origins(numbers: Iterable[Any]) -> dict[Notice, frozenset[Place]]:
    found: dict[Notice, frozenset[Place]] = {}
    for x in numbers:
        for notice, places in x.origins.items() if isinstance(x, _Deciding) else ():
            found[notice] = found.get(notice, frozenset()) | places
    return found


def _question(function: Callable[..., Any], numbers: Iterable[Any]) -> Question:
    """What ``function`` gives of the numbers that come of others."""
    of = [(x.value, None) if isinstance(x, _Deciding) else (None, plain_number(x)) for x in numbers]
    return lambda told: function(*(x if value is None else value(told) for value, x in of))


def deciding(value: Any, place: Place, notice: Notice) -> Any:
    """A watched number for the int or float ``value`` at ``place``; anything else as it is.

    Example::

        number = deciding(2.0, "net.scale", lambda places, question: print(*places))
        number * 2 > 3  # prints net.scale
    """
    return _watch(value, {notice: frozenset((place,))}, lambda told: told[place])


def watch_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Questions, kinds: tuple[type, ...] = _KINDS
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with watched numbers among them, whose questions come to ``found``.

    Args:
        args: its positional arguments.
        kwargs: its keyword arguments.
        found: questions so far.
        kinds: of the numbers that are watched, int or float or both.
    """

    def notice(places: frozenset[Place], question: Question) -> None:
        questions = found.setdefault(places, [])
        if len(questions) < _MOST:
            questions.append(question)

    def watch(place: Place, x: Any) -> Any:
        return deciding(x, place, notice) if type(x) in kinds else x

    return tuple(map(watch, range(len(args)), args)), {key: watch(key, x) for key, x in kwargs.items()}


def watching(call: Callable[..., Any], found: Questions) -> Callable[..., Any]:
    """``call`` with watched numbers among its own arguments, whose questions come to ``found``.

    Example::

        found: Questions = {}
        watching(lambda step: step % 2 == 1 and step < 10, found)(3)
        assert answers(asked(found), (5,), {}) == (True, True)
        assert answers(asked(found), (13,), {}) == (True, False)
    """

    def watched(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = watch_arguments(args, kwargs, found)
        return call(*args, **kwargs)

    return watched


def asked(found: Questions) -> Asked:
    """What was asked, of whichever numbers."""
    return tuple(question for questions in found.values() for question in questions)


def answers(asked: Asked, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What these arguments answer; None where there is no such number, or no answer."""
    given: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    told = {place: x for place, x in given if type(x) in _KINDS}
    return tuple(_answer(question, told) for question in asked)


def _answer(question: Question, told: Mapping[Place, Any]) -> Any:
    try:
        return question(told)
    except (KeyError, ArithmeticError, TypeError, ValueError):  # of other numbers, as NaN, it may have no answer
        return None
