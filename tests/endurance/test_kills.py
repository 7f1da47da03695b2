"""Cells of `tests.endurance.kills`: the others end within ten seconds, and leave nothing behind."""

from __future__ import annotations

from itertools import product

import pytest

from tests.endurance.kills import LAUNCHERS, MOMENTS, STRATEGIES, Kill, run
from tests.helpers.slow import slow

CELLS = {"-".join(cell).replace(" ", ""): cell for cell in product(LAUNCHERS, STRATEGIES, MOMENTS)}


@slow()
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_left_ends_soon(victim: int, cell: str) -> None:
    outcome = run(Kill(*CELLS[cell], victim, 0.01))
    assert outcome.good, outcome
