"""A dict's version tells whether it was written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_par.private.dict_versions import dict_behind, version_of_dict

_WRITES: list[Callable[[Any], object]] = [
    lambda x: setattr(x, "seen", 2),
    lambda x: setattr(x, "new", 1),
    lambda x: delattr(x, "seen"),
    lambda x: x.train(not x.training),
    lambda x: vars(x).update(seen=3),
    lambda x: vars(x).pop("seen"),
    lambda x: vars(x).clear(),
    lambda x: object.__setattr__(x, "seen", 4),
    lambda x: vars(x).setdefault("other", 1),
]


@pytest.mark.parametrize("write", _WRITES)
def test_each_write_changes_it(write: Callable[[Any], object]) -> None:
    module = nn.Linear(1, 1)
    module.seen = 1
    before = version_of_dict(vars(module))
    assert module.seen == 1 and "seen" in vars(module) and version_of_dict(vars(module)) == before
    write(module)
    assert version_of_dict(vars(module)) != before


def test_what_is_put_back_has_another_too() -> None:
    held = {"a": 1}
    before = version_of_dict(held)
    held["a"] = 2
    held["a"] = 1
    assert version_of_dict(held) != before != version_of_dict(dict(held))


def test_the_dict_of_a_class_is_found() -> None:
    class Layer(nn.Linear):
        rate = 1

    held = dict_behind(vars(Layer))
    assert held is not None and held["rate"] == 1 and held.keys() == vars(Layer).keys()
    before = version_of_dict(held)
    assert Layer(1, 1).rate == 1 and version_of_dict(held) == before
    Layer.rate = 2
    assert version_of_dict(held) != before and held["rate"] == 2
    before = version_of_dict(held)
    Layer.forward = nn.Linear.forward  # type: ignore[method-assign]
    assert version_of_dict(held) != before
