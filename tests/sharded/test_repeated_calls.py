"""What repeated calls come to, noted once, gives what their rules give."""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded import patches
from lightning_par.sharded.local_calls.repeated_calls import Call
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.rule_check import KINDS, Case, check
from tests.helpers.slow import in_turn, slow
from tests.helpers.thread_ranks import SequenceThreadAxis
from tests.rule_cases import CASES

patches.SHARES.hold(sys.modules[__name__])  # the cases' backwards begin with shares

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of old spellings that the cases call on purpose


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """All calls are noted and done again at once; whether each could be."""
    found: list[bool] = []

    def run(self: Call, func: Any, args: Any, kwargs: Any, by_rule: Any) -> Any:
        result, program = self._noted(func, args, kwargs, by_rule)
        found.append(program is not None)
        return result if program is None else program(*self.tensors)

    monkeypatch.setattr(Call, "run", run)
    return found


@pytest.mark.parametrize(
    ("case", "kind"), list(zip(CASES, cycle(KINDS))), ids=in_turn([case.name for case in CASES], KINDS)
)
def test_value_and_gradient(noted: list[bool], case: Case, kind: str) -> None:
    check(case, [kind])


@slow(but=[case.name for case in CASES[::8]])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_value_and_gradient_along_the_sequence(noted: list[bool], case: Case) -> None:
    check(case, ["zigzag"], SequenceThreadAxis)
