"""Where the global generators stand is asked once, and is right whoever moves them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from lightning_par.python_state.global_generators import NUMPY, PYTHON, GlobalGenerator, are_same

_KINDS: dict[str, tuple[GlobalGenerator, Callable[[], float], Callable[[], object]]] = {
    "numpy": (NUMPY, np.random.randn, np.random.get_state),
    "random": (PYTHON, lambda: random.gauss(0.0, 1.0), random.getstate),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_it_draws_again_from_where_it_stood(kind: str) -> None:
    standing, draw, _ = _KINDS[kind]
    draw()
    state = standing.get()
    assert standing.get() is state
    drawn = [draw(), draw()]
    assert standing.get() is not state
    for _ in range(2):  # put back from elsewhere, and once it is there
        standing.set(state)
        standing.set(state)
        assert standing.get() is state and [draw(), draw()] == drawn


@pytest.mark.parametrize("kind", _KINDS)
def test_a_state_is_not_taken_for_that_of_another_place(kind: str) -> None:
    standing, draw, tell = _KINDS[kind]
    first = standing.get()
    draw()
    others = tell()  # by the user's code
    second = standing.get()
    standing.set(first)
    drawn = draw()
    standing.set(second)
    pair = (second, random.getstate()) if kind == "numpy" else (np.random.get_state(), second)
    same = (others, pair[1]) if kind == "numpy" else (pair[0], others)
    assert are_same(pair, same)
    standing.set(first)
    assert draw() == drawn


def test_another_kind_of_generator_is_asked_each_time() -> None:
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        state = NUMPY.get()
        drawn = np.random.rand()
        NUMPY.set(state)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(own)
