"""Where the global generators of numpy and ``random`` stand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_par.private.generator_memory import memory_of_numpy, memory_of_random


class GlobalGenerator:
    """One of the global generators, asked for its state once as long as it stands there.

    Args:
        memory: of the generator.
        tell: its state, which nobody writes into.
        move: puts it there.

    Example::

        state = NUMPY.get()
        assert NUMPY.get() is state
        numpy.random.rand()
        NUMPY.set(state)
    """

    def __init__(self, memory: Callable[[], Any], tell: Callable[[], Any], move: Callable[[Any], None]) -> None:
        self._memory, self._tell, self._move = memory, tell, move
        self._known: tuple[Any, Any] = None, None  # its memory, and its state then

    def get(self) -> Any:
        """Its state."""
        memory, state = self._memory(), self._known[1]
        if memory is None or memory != self._known[0]:
            state = self._tell()
            self._known = memory, state
        return state

    def set(self, state: Any) -> None:
        """Put it where ``state`` says."""
        memory, known = self._known
        if state is not known or memory is None or memory != self._memory():
            self._move(state)
            self._known = self._memory(), state


NUMPY = GlobalGenerator(memory_of_numpy, lambda: np.random.get_state(), lambda state: np.random.set_state(state))
PYTHON = GlobalGenerator(memory_of_random, lambda: random.getstate(), lambda state: random.setstate(state))


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two states of numpy's generator and of Python's are the same."""
    (numpy, python), (of_numpy, of_python) = some, others
    if numpy is not of_numpy and not all(map(np.array_equal, numpy, of_numpy)):
        return False
    return python is of_python or python == of_python
