"""Positions: equal ones are one object, as long as somebody holds it."""

from __future__ import annotations

import gc
import weakref

from lightning_par.mesh import positions
from lightning_par.mesh.positions import Positions


def test_equal_ones_are_one_object_however_many_were_met_since() -> None:
    first = Positions.of([0, 0, 1])
    for size in range(2, 5000):
        Positions.of([0] * size + [1])
    assert Positions.of([0, 0, 1]) is first


def test_what_nobody_holds_is_forgotten() -> None:
    known = weakref.ref(Positions.of([1, 0, 1, 1]))
    assert known() is not None
    positions._interned.cache_clear()
    gc.collect()
    assert known() is None and Positions.of([1, 0, 1, 1]).owner.tolist() == [1, 0, 1, 1]
