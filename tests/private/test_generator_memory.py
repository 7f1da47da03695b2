"""The memory of the global generators tells whether they have moved."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from lightning_par.private.generator_memory import memory_of_numpy, memory_of_random

_DRAWS = {
    "numpy": (np.random.rand, np.random.randn, lambda: np.random.seed(3), lambda: np.random.shuffle([*range(9)])),
    "random": (random.random, lambda: random.gauss(0.0, 1.0), lambda: random.seed(3), lambda: random.randint(0, 9)),
}
_MEMORY = {"numpy": memory_of_numpy, "random": memory_of_random}


@pytest.mark.parametrize("kind, draw", [(kind, draw) for kind, draws in _DRAWS.items() for draw in draws])
def test_each_draw_changes_it(kind: str, draw: Callable[[], object]) -> None:
    memory = _MEMORY[kind]
    before = memory()
    assert before is not None and before == memory()
    for _ in range(2):  # of two normal numbers that are drawn at once, the second one moves no word
        draw()
        assert memory() != before or draw is _DRAWS[kind][2]
        before = memory()


@pytest.mark.parametrize("kind", _MEMORY)
def test_what_is_put_back_has_the_same(kind: str) -> None:
    memory = _MEMORY[kind]
    random.gauss(0.0, 1.0), np.random.randn()
    before, states = memory(), (np.random.get_state(), random.getstate())
    random.gauss(0.0, 1.0), np.random.randn()
    assert memory() != before
    np.random.set_state(states[0]), random.setstate(states[1])
    assert memory() == before


def test_of_another_kind_of_generator_it_tells_nothing() -> None:
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        assert memory_of_numpy() is None
    finally:
        np.random.set_bit_generator(own)
    assert memory_of_numpy() is not None
