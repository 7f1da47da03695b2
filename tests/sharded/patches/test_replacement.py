"""An attribute is replaced for a while, whoever else replaces it meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_par.sharded.patches.replacement import Replacement, Use, replaced


class Base:
    inherited = staticmethod(lambda x: x)


class Owner(Base):
    @classmethod
    def own(cls, x: int) -> int:
        return x


def _plus_ten(plain: Any, use: Use) -> Any:
    def call(*args: Any) -> Any:
        return plain.__get__(None, Owner)(*args) + 10 * use.on

    return staticmethod(call)


@pytest.mark.parametrize("name", ["own", "inherited"])
def test_an_attribute_is_put_back(name: str) -> None:
    before, replacement = vars(Owner).get(name), Replacement(Owner, name, _plus_ten)
    seen = []
    for _ in range(2):
        replacement.install()
        assert getattr(Owner, name)(1) == 11
        seen.append(vars(Owner)[name])
        replacement.undo()
        assert getattr(Owner, name)(1) == 1 and vars(Owner).get(name) is before
    assert seen[0] is seen[1]  # who has imported it has it in the next run, too


def _twice(plain: Any, use: Use) -> Any:
    return lambda x: plain(x) * (2 if use.on else 1)


def test_what_others_put_over_it_stays() -> None:
    owner: Any = SimpleNamespace(f=lambda x: x)
    plain, replacement = owner.f, Replacement(owner, "f", _twice)
    replacement.install()
    ours = owner.f
    owner.f = others = lambda x: ours(x) + 1
    assert owner.f(3) == 7
    replacement.undo()
    assert owner.f is others and owner.f(3) == 4
    replacement.install()
    assert owner.f(3) == 8  # once, not twice
    replacement.undo()
    assert owner.f is others and owner.f(3) == 4
    owner.f = ours  # they undo theirs
    assert owner.f(3) == 3
    replacement.install()
    assert owner.f(3) == 6
    replacement.undo()
    assert owner.f is plain


def test_what_others_took_away_stays_away() -> None:
    owner: Any = SimpleNamespace(f=lambda x: x)
    plain, replacement = owner.f, Replacement(owner, "f", _twice)
    replacement.install()
    owner.f = plain
    replacement.undo()
    assert owner.f is plain
    replacement.install()
    assert owner.f(3) == 6
    replacement.undo()
    assert owner.f is plain


def test_a_replacement_ends_with_its_context() -> None:
    owner: Any = SimpleNamespace(f=lambda x: x)
    plain = owner.f
    with pytest.raises(ZeroDivisionError), replaced(owner, "f", _twice):
        assert owner.f(3) == 6
        raise ZeroDivisionError
    assert owner.f is plain
