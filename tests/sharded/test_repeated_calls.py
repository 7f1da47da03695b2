"""What repeated calls come to, noted once, gives what their rules give."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.local_calls.form import form_of
from lightning_par.sharded.local_calls.repeated_calls import Call
from lightning_par.sharded.parameter import sharded_parameter
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.rule_check import KINDS, Case, check
from tests.helpers.slow import in_turn, slow
from tests.helpers.thread_ranks import SequenceThreadAxis, run_ranks
from tests.rule_cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, of old spellings that the cases call on purpose
    pytest.mark.usefixtures("shares"),
]


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


_IDS = in_turn([case.name for case in CASES], KINDS)


@slow(but=_IDS[::8])
@pytest.mark.parametrize(("case", "kind"), list(zip(CASES, cycle(KINDS))), ids=_IDS)
def test_value_and_gradient(noted: list[bool], case: Case, kind: str) -> None:
    check(case, [kind])


@slow(but=[case.name for case in CASES[::16]])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_value_and_gradient_along_the_sequence(noted: list[bool], case: Case) -> None:
    check(case, ["zigzag"], SequenceThreadAxis)


def test_a_setting_that_equals_another_is_another() -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    x = ShardedTensor(torch.ones(2, 4), 1, Positions.of([0] * 4), axis)
    for zero in (0.0, -0.0) * 4:
        assert torch.equal((x / zero).full_tensor(), torch.ones(2, 4) / zero)
    for number in (1, True, 1.0) * 4:
        assert (x.long() * number).dtype == (torch.ones(1).long() * number).dtype


def test_what_autograd_and_autocast_do_is_part_of_a_call() -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    split = ShardedTensor(weight, 0, Positions.of([0] * 4), axis)
    x = torch.ones(2, 4)
    for _ in range(4):
        assert F.linear(x, split).requires_grad
        with torch.no_grad():
            assert not F.linear(x, split).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, split).dtype == torch.bfloat16
        weight.requires_grad_(False)
        assert not F.linear(x, split).requires_grad
        weight.requires_grad_(True)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(F.linear(x, split).full_tensor(), F.linear(x, weight))


@pytest.mark.parametrize("told", [{"inplace": True}, (True,)], ids=["keyword", "by place"])
def test_what_is_told_to_write_writes_each_time(told: Any) -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    args, kwargs = ((), told) if isinstance(told, dict) else (told, {})
    for _ in range(4):
        x = ShardedTensor(torch.tensor([[-1.0, 2.0]]), 1, Positions.of([0] * 2), axis)
        with torch.no_grad():
            F.relu(x, *args, **kwargs)
        assert x.full_tensor().tolist() == [[0.0, 2.0]]


def _beside_a_copy(axis: Axis) -> tuple[set[str], list[float]]:
    """The functions that the table knows, and what ``x`` holds in the end."""
    positions = Positions.of([0, 0, 1, 1])
    x, other = (ShardedTensor(torch.ones(2, 2), 1, positions, axis) for _ in range(2))
    kept = x[:, 1]  # of both ranks, where one device has a view
    for _ in range(4):
        other * 2
        x + 0
        kept += 1
    return {key[0].__name__ for key in axis.calls}, (x + 0).full_tensor()[0].tolist()


def test_calls_repeat_beside_a_copy_of_another_tensor() -> None:
    assert run_ranks(2, _beside_a_copy) == [({"__getitem__", "mul"}, [1.0, 5.0, 1.0, 1.0])] * 2


def _moved(x: Any) -> None:
    x.data = torch.ones(2, 4, dtype=torch.float64)


def _without_a_graph(x: Any) -> None:
    x.detach_()


def _written_to(x: Any) -> None:
    x.mul_(torch.full((2, 4), 3.0, requires_grad=True))


@pytest.mark.parametrize("change", [_moved, _without_a_graph, _written_to])
@pytest.mark.parametrize("grad", [False, True])
def test_a_result_that_is_laid_out_anew_is_another_argument(change: Any, grad: bool) -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    start = torch.arange(8.0).view(2, 4).requires_grad_(grad)
    for changed in (False, False, False, True, True, True, True):
        y, plain = ShardedTensor(start, 1, Positions.of([0] * 4), axis) * 2, start * 2
        if changed:
            change(y)
            change(plain)
        z, whole = y + 1, plain + 1
        assert torch.equal(z.full_tensor(), whole) and z.requires_grad == whole.requires_grad
        assert z.dtype == whole.dtype


def test_a_weight_that_is_laid_out_anew_is_another_argument() -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    weight = sharded_parameter(torch.ones(4, 4), 0, Positions.of([0] * 4), axis)
    for dtype in [torch.float32] * 3 + [torch.float64] * 4:
        weight.data = weight.data.to(dtype)
        assert weight.dtype == dtype and isinstance(weight, torch.nn.Parameter)
        assert F.linear(torch.ones(2, 4, dtype=dtype), weight).dtype == dtype
    for wanted in (True, False) * 4:
        weight.requires_grad = wanted
        assert F.linear(torch.ones(2, 4, dtype=torch.float64), weight).requires_grad == wanted


def test_strides_told_later_are_part_of_a_form() -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    x = ShardedTensor(torch.ones(2, 4), 1, Positions.of([0] * 4), axis)
    before = form_of(x)
    assert form_of(x) is before
    x._strides = (1, 2)
    after = form_of(x)
    assert after is not before and after is form_of(x) and after is not None and after.strides == (1, 2)
