"""A function that does something else for a while, whoever holds it."""

from __future__ import annotations

import sys
import types
from typing import Any

from lightning_par.sharded.patches.every_name import EveryName
from lightning_par.sharded.patches.function_code import FunctionCode


def _plus(x: int, *, more: int = 1) -> int:
    """More."""
    return x + more


def _closed(step: int) -> Any:
    def plus(x: int) -> int:
        return x + step

    return plus


def _twice(plain: Any, use: Any) -> Any:
    return lambda *args, **kwargs: plain(*args, **kwargs) * (2 if use.on else 1)


def _holds(x: int, plus: Any = _plus) -> int:
    return int(plus(x, more=2))


def test_whoever_holds_a_function_has_the_other_one() -> None:
    table, plus = {"plus": _plus}, _closed(3)
    codes = [FunctionCode(_plus, _twice), FunctionCode(plus, _twice)]
    for _ in range(2):
        for code in codes:
            code.install()
        assert (table["plus"](1), _holds(1), plus(1), _plus.__doc__) == (4, 6, 8, "More.")
        for code in codes:
            code.undo()
        assert (table["plus"](1), _holds(1), plus(1)) == (2, 3, 4)


def test_what_another_has_put_there_stays() -> None:
    plus, other = _closed(3), _closed(5)
    own = plus.__code__
    other.__code__ = (lambda step: lambda x: x - step)(0).__code__
    code = FunctionCode(plus, _twice)
    code.install()
    ours, plus.__code__ = plus.__code__, other.__code__
    code.undo()
    assert plus(1) == -2
    plus.__code__ = ours  # put back, below which ours is off
    assert plus(1) == 4
    code.install()
    assert plus(1) == 8
    code.undo()
    assert plus.__code__ is own and plus(1) == 4


def test_a_function_of_c_has_another_one_by_every_name(monkeypatch: Any) -> None:
    owner, user, late = (types.ModuleType(name) for name in ("owner", "a_user", "late"))
    owner.largest = user.most = max  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_user", user)
    patch = EveryName(owner, "largest", _twice)
    patch.install()
    late.most = user.most
    assert user.most(1, 2) == owner.largest(1, 2) == 4
    patch.undo()
    assert user.most is owner.largest is max and late.most(1, 2) == 2
    monkeypatch.setitem(sys.modules, "late", late)
    patch.install()
    assert late.most(1, 2) == user.most(1, 2) == 4 and late.most is user.most
    patch.undo()
