"""Objects that others hold are found, and no code of these runs."""

from __future__ import annotations

import functools
import random
from typing import Any

from lightning_par.python_state.find_objects import find_objects


class Lazy:
    """Answers for what it has not by importing it, as objects of `six.moves` do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


class Holds:
    def __init__(self) -> None:
        self.lazy, self.module, self.rows = Lazy(), random, lambda: self.own
        self.own = random.Random(1)

    def read(self) -> None: ...


def test_a_look_for_generators_runs_no_code_of_what_it_meets() -> None:
    holds = Holds()
    rows, read = Holds().rows, functools.partial(holds.read)
    assert find_objects([holds], (random.Random,)) == [holds.own]
    assert find_objects([read], (random.Random,)) == [holds.own]
    assert find_objects([rows], (random.Random,)) == [rows()]
