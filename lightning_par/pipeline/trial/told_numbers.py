"""Numbers that a unit is told, as by ``layer(x, step=self.global_step)``: what it decides by them, not what they are.

In a trial a watched number stands for each. What it is compared with is kept as questions, which a dry run asks of the
number that it meets: where all have the same answers, the unit's code goes the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Question = Callable[[Any], Any]
Asked = tuple[tuple[int | str, tuple[Question, ...]], ...]
"""By the place of an argument, what is asked of it."""

_KINDS = (int, float)
_MOST = 100  # questions about one number; a loop may ask more than anyone needs to know
_COMPARISONS = "lt le gt ge eq ne"
_OPERATIONS = "add sub mul truediv floordiv mod pow"


class _Watched:
    """What a whole number and a float have in common; `ask` keeps a question, ``told`` makes this of the argument."""

    questions: list[Question]
    told: Question

    def ask(self, question: Question) -> None:
        if len(self.questions) < _MOST:
            self.questions.append(question)


class _Whole(int, _Watched):
    pass


class _Float(float, _Watched):
    pass


def _watch(value: Any, questions: list[Question], told: Question) -> Any:
    if type(value) not in _KINDS:
        return value
    x: Any = (_Whole if type(value) is int else _Float)(value)
    x.questions, x.told = questions, told
    return x


def _plain(x: Any) -> Any:
    if not isinstance(x, _Watched):
        return x
    return int.__int__(x) if isinstance(x, int) else float.__float__(x)  # type: ignore[arg-type]


def _comparison(name: str) -> Any:
    func = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        told, with_ = self.told, _plain(other)
        if type(with_) in _KINDS:
            self.ask(lambda x: func(told(x), with_))
        return func(_plain(self), with_)

    return method


def _operation(name: str, reflected: bool) -> Any:
    func = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        told, with_ = self.told, _plain(other)
        if type(with_) not in _KINDS:
            return NotImplemented
        if reflected:
            return _watch(func(with_, _plain(self)), self.questions, lambda x: func(with_, told(x)))
        return _watch(func(_plain(self), with_), self.questions, lambda x: func(told(x), with_))

    return method


def _truth(self: Any) -> bool:
    told = self.told
    self.ask(lambda x: bool(told(x)))
    return bool(_plain(self))


def _conversion(kind: Any) -> Any:
    def method(self: Any, *args: Any) -> Any:
        told = self.told
        return _watch(kind(_plain(self), *args), self.questions, lambda x: kind(told(x), *args))

    return method


def _reduced(self: Any, protocol: Any) -> Any:
    return type(_plain(self)), (_plain(self),)  # what copies it, or sends it, has a plain one


for _kind in (_Whole, _Float):
    for _name in _COMPARISONS.split():
        setattr(_kind, f"__{_name}__", _comparison(_name))
    for _name in _OPERATIONS.split():
        setattr(_kind, f"__{_name}__", _operation(_name, False))
        setattr(_kind, f"__r{_name}__", _operation(_name, True))
    for _name, _func in {"abs": abs, "neg": operator.neg, "round": round}.items():
        setattr(_kind, f"__{_name}__", _conversion(_func))
    for _name, _func in {"bool": _truth, "reduce_ex": _reduced, "hash": _kind.__base__.__hash__}.items():
        setattr(_kind, f"__{_name}__", _func)


def watching(call: Callable[..., Any], found: dict[int | str, list[Question]]) -> Callable[..., Any]:
    """``call`` with watched numbers among its own arguments, whose questions come to ``found``.

    Example::

        found: dict[int | str, list[Question]] = {}
        watching(lambda step: step % 2 == 1 and step < 10, found)(3)
        assert answers(asked(found), (5,), {}) == (True, True)
        assert answers(asked(found), (13,), {}) == (True, False)
    """

    def watch(place: int | str, x: Any) -> Any:
        return _watch(x, found.setdefault(place, []), lambda told: told) if type(x) in _KINDS else x

    def watched(*args: Any, **kwargs: Any) -> Any:
        return call(*map(watch, range(len(args)), args), **{key: watch(key, x) for key, x in kwargs.items()})

    return watched


def asked(found: dict[int | str, list[Question]]) -> Asked:
    """What was asked of numbers, by place."""
    return tuple((place, tuple(questions)) for place, questions in found.items() if questions)


def answers(asked: Asked, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What these arguments answer; None where there is no such number."""
    said: list[Any] = []
    for place, questions in asked:
        x = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        said += [_answer(question, x) for question in questions]
    return tuple(said)


def _answer(question: Question, x: Any) -> Any:
    try:
        return bool(question(x)) if type(x) in _KINDS else None
    except ArithmeticError:
        return None
