"""Numbers that say what is computed of them, and what is decided by them."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_par.trial.watched_number import WatchedNumber, plain_number


class _Watched(WatchedNumber):
    decisions: list[Any]

    def computed(self, result: Any, function: Any, numbers: Any) -> Any:
        return watched(result, self.decisions)

    def decided(self, result: Any, function: Any, numbers: Any) -> Any:
        assert function(*map(plain_number, numbers)) == result
        self.decisions.append(result)
        return result


class _Int(_Watched, int):
    pass


class _Float(_Watched, float):
    pass


def watched(value: Any, decisions: list[Any]) -> Any:
    if type(value) not in (int, float):
        return value
    number = _Int(value) if type(value) is int else _Float(value)
    number.decisions = decisions
    return number


COMPUTING: list[Callable[[Any], Any]] = [
    lambda x: x + 1, lambda x: 1 - x, lambda x: x * 0.5, lambda x: 7 / x, lambda x: x // 2, lambda x: 7 % x,
    lambda x: 2**x, lambda x: -x, lambda x: +x, abs, lambda x: round(x, 1), lambda x: divmod(x, 2)[1],
    lambda x: divmod(7, x)[0], lambda x: x - x, lambda x: x + np.float64(2), lambda x: x + True,
    lambda x: pow(x, 2, 5) if isinstance(x, int) else x + 1,
]  # fmt: skip
DECIDING: list[Callable[[Any], Any]] = [
    lambda x: x < 3, lambda x: 3 >= x, lambda x: x == 3, lambda x: x != 2.5, lambda x: 1 < x, bool,
]  # fmt: skip
COUNTING: list[Callable[[Any], Any]] = [int, round, math.floor, math.ceil, math.trunc]


@pytest.mark.parametrize("value", [3, 2.5])
@pytest.mark.parametrize("function", COMPUTING)
def test_what_is_computed_stays_watched(value: Any, function: Callable[[Any], Any]) -> None:
    decisions: list[Any] = []
    result = function(watched(value, decisions))
    assert isinstance(result, _Watched) and not decisions
    assert plain_number(result) == function(value) and isinstance(result, int) == isinstance(function(value), int)


@pytest.mark.parametrize("value", [3, 2.5])
@pytest.mark.parametrize("function", DECIDING)
def test_what_is_decided_is_told(value: Any, function: Callable[[Any], Any]) -> None:
    decisions: list[Any] = []
    assert function(watched(value, decisions)) is function(value) and decisions == [function(value)]


@pytest.mark.parametrize("function", COUNTING)
def test_a_whole_number_made_of_a_float_is_told(function: Callable[[Any], int]) -> None:
    decisions: list[Any] = []
    assert type(function(watched(2.5, decisions))) is int and decisions == [function(2.5)]
    assert plain_number(function(watched(3, decisions))) == 3 and len(decisions) == 1


def test_to_others_it_is_the_plain_number() -> None:
    number = watched(2.5, [])
    assert type(pickle.loads(pickle.dumps(number))) is float and copy.deepcopy([number])[0] is number
    assert f"{number:.1f}" == "2.5" and hash(number) == hash(2.5) and number not in ("a", None)
    assert operator.index(watched(3, [])) == 3 and isinstance(watched(-8.0, []) ** 0.5, complex)
    assert (number > np.float64(1)) is True
    with pytest.raises(TypeError):
        number < "a"  # noqa: B015
    with pytest.raises(ZeroDivisionError):
        number / 0
