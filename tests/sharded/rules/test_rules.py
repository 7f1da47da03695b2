"""Every rule of the table, by value and gradient, on positions of every kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.collectives import scatter
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.rules.lookup import RULES
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.rule_check import KINDS, Case, call_on_one_rank, check
from tests.helpers.slow import in_turn, slow
from tests.helpers.thread_ranks import SequenceThreadAxis, ThreadAxis, run_ranks
from tests.rule_cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, of old spellings that the cases call on purpose
    pytest.mark.usefixtures("shares"),
]


every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.mark.parametrize(
    ("case", "kind"), list(zip(CASES, cycle(KINDS))), ids=in_turn([case.name for case in CASES], KINDS)
)
def test_value_and_gradient(case: Case, kind: str) -> None:
    check(case, [kind])


@slow()
@every_case
def test_value_and_gradient_on_positions_of_every_kind(case: Case) -> None:
    check(case)


@slow(but=[*(case.name for case in CASES[::16]), "several of each row"])
@every_case
def test_value_and_gradient_along_the_sequence(case: Case) -> None:
    check(case, ["zigzag"], SequenceThreadAxis)


class _Called(TorchFunctionMode):
    """The names of the functions that are called with sharded arguments, by the case and not by a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, ShardedTensor) for x in tree_leaves((args, kwargs))):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_every_rule_has_a_case() -> None:
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    with _Called() as called:
        for case in CASES:
            call_on_one_rank(case, axis)
        for draw in DRAWS.values():
            draw(_sharded(axis, torch.full((4, 6), 0.5)))
    elsewhere = {
        "grad",
        "backward",
        "_amp_foreach_non_finite_check_and_unscale_",
        "cuda",
    }  # test_training.py; needs a GPU
    elsewhere |= {"_has_compatible_shallow_copy_type"}  # test_surface_runs.py
    elsewhere |= {"has_names"}  # not in torch 2.13
    elsewhere |= {"data_ptr", "storage", "untyped_storage"}  # between steps: tests/pretrained/test_save.py
    elsewhere |= {"numpy", "__array__"}  # of weights: test_arrays.py
    assert elsewhere <= RULES.keys()
    missing = RULES.keys() - called.names - elsewhere
    assert not missing, f"rules that no line of tests/rule_cases calls: {sorted(missing)}"


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "dropout inplace": lambda x: F.dropout(x, 0.5, inplace=True),
    "dropout_": lambda x: torch.dropout_(x, 0.5, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x, 0.5, True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "normal_": lambda x: x.normal_(std=2),
    "exponential_": lambda x: x.exponential_(),
    "randint_like": lambda x: torch.randint_like(x, 99),
    "poisson": lambda x: torch.poisson(9 * x),
    "random_": lambda x: x.random_(99),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.1),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu_": lambda x: F.rrelu_(x.neg_(), training=True),
}


def _sharded(axis: Any, x: Tensor, dim: int = 1) -> ShardedTensor:
    positions = Positions.of([i % axis.size for i in range(x.shape[dim])])
    part = x.index_select(dim, positions.index(axis.rank, x.device))
    return ShardedTensor(part, dim, positions, axis)


@pytest.mark.parametrize("name", DRAWS)
def test_a_sharded_draw_is_each_shards_own(name: str) -> None:
    def draw(axis: ThreadAxis, step: int) -> tuple[Tensor, Tensor, bool, list[str]]:
        RunState.current.streams.begin_step(seed=3, step=step)
        before = torch.get_rng_state()
        first = DRAWS[name](_sharded(axis, torch.full((64, 4), 0.5)))
        second = DRAWS[name](_sharded(axis, torch.full((64, 4), 0.5)))
        assert first.shape == (64, 4)
        return first.local, second.local, torch.equal(before, torch.get_rng_state()), axis.gathered

    once, again, later = run_ranks(2, draw, 0), run_ranks(2, draw, 0), run_ranks(2, draw, 1)
    for rank in range(2):
        assert once[rank][2], "the shared generator moved"
        assert not once[rank][3]
        assert torch.equal(once[rank][0], again[rank][0]) and torch.equal(once[rank][1], again[rank][1])
        assert not torch.equal(once[rank][0], once[rank][1]), "two events draw alike"
        assert not torch.equal(once[rank][0], later[rank][0]), "two steps draw alike"
    assert not torch.equal(once[0][0], once[1][0]), "two shards draw alike"


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_drops_out_by_shard(need_weights: bool) -> None:
    def attend(axis: ThreadAxis) -> bool:
        RunState.current.streams.begin_step(seed=3, step=0)
        q = _sharded(axis, torch.randn(2, 4, 3, 2))
        before = torch.get_rng_state()
        if need_weights:
            F.dropout(torch.softmax(q @ q.mT, -1), 0.5) @ q
        else:
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return torch.equal(before, torch.get_rng_state())

    assert run_ranks(2, attend) == [True, True]


def test_a_users_generator_draws_for_the_whole() -> None:
    def draw(axis: ThreadAxis) -> Tensor:
        x = _sharded(axis, torch.zeros(4, 6))
        x.uniform_(generator=torch.Generator().manual_seed(5))
        return x.full_tensor()

    expected = torch.zeros(4, 6).uniform_(generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(x, expected) for x in run_ranks(2, draw))


def test_a_write_through_a_view_reaches_the_whole() -> None:
    def write(axis: ThreadAxis) -> Tensor:
        x = _sharded(axis, torch.zeros(4, 6))
        x.view(2, 2, 6)[0].add_(1)
        x.t()[:, 1:3].mul_(3)
        y = x.narrow(0, 2, 2)
        y[:, [0, 5]] = 7  # no rule: gathers, and is written back into the memory that x sees
        return x.full_tensor()

    expected = torch.zeros(4, 6)
    expected[:2] = 1
    expected[1:3] *= 3
    expected[2:, [0, 5]] = 7
    assert all(torch.equal(x, expected) for x in run_ranks(2, write))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "copy_": lambda x: x.copy_(torch.zeros(x.shape)),
    "uniform_": lambda x: x.uniform_(),
    "no rule": lambda x: x.index_fill_(0, torch.tensor([0]), 1.0),
    "view": lambda x: x.view(-1).zero_(),
    "foreach": lambda x: torch._foreach_add_([x], 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_copied_slice_is_one_into_the_tensor(name: str) -> None:
    def write(axis: ThreadAxis) -> Tensor:
        positions = Positions.of([0, 0, 0, 1, 1, 1])
        x = ShardedTensor(scatter(torch.arange(24.0).view(4, 6), 1, positions, axis), 1, positions, axis)
        WRITES[name](x[:, ::2])
        return x.full_tensor()

    def drawn(x: Tensor) -> Tensor:
        return (x[:, ::2] < 1).all() & (x[:, 1::2] == expected[:, 1::2]).all()

    expected = torch.arange(24.0).view(4, 6)
    if name == "uniform_":
        assert all(drawn(x) for x in run_ranks(2, write))
        return
    WRITES[name](expected[:, ::2])
    assert all(torch.equal(x, expected) for x in run_ranks(2, write))


def test_sizes_that_do_not_fit_raise_as_in_torch() -> None:
    def add(axis: ThreadAxis) -> None:
        x = _sharded(axis, torch.zeros(4, 6))
        with pytest.raises(RuntimeError, match="must match"):
            x + torch.zeros(4, 3)
        with pytest.raises((RuntimeError, IndexError)):
            x.narrow(1, 4, 3)
        with pytest.raises((RuntimeError, IndexError)):
            F.cross_entropy(x, torch.tensor([0, 1, 6, 2]))
        with pytest.raises(RuntimeError, match="shape"):
            x.t_()

    run_ranks(2, add)
