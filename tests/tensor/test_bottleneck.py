"""Small layers beside large ones, as low-rank updates are: which of their weights are split, and which stay whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.tensor.plan import TensorPlan
from tests.tensor.test_plan import C, plan_of, splits, styles

WIDE = 64


class Updated(nn.Module):
    """A layer, and what a product of two small weights adds to it."""

    def __init__(self, inner: int, outer: int, rank: int, first: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer, bias=False)
        self.a, self.b = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.b(F.gelu(self.a(x))) * 2 + self.base(x)
        return self.base(x) + self.b(self.a(F.dropout(x, 0.1))) * 2


class Pair(nn.Module):
    def __init__(self, rank: int, first: bool = False) -> None:
        super().__init__()
        self.up, self.down = Updated(C, WIDE, rank, first), Updated(WIDE, C, rank, first)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


BASE = {"up.base.weight": "colwise 0", "down.base.weight": "rowwise 1"}


def reasons(plan: TensorPlan) -> dict[str, str]:
    return {names[0].removeprefix("m."): reason for names, _, reason in plan.whole}


@pytest.mark.parametrize("first", [False, True])
def test_a_low_rank_update_has_its_inner_half_whole_and_the_other_split_like_its_layer(first: bool) -> None:
    plan = plan_of(Pair(4, first), torch.randn(3, C))
    assert styles(plan) == BASE | {"up.b.weight": "colwise 0", "down.a.weight": "rowwise 1"}
    base, update = (splits(plan)[f"up.{name}.weight"].positions.owner.tolist() for name in ("base", "b"))
    assert base == update
    assert all("a small layer beside" in reason for reason in reasons(plan).values())


def test_an_update_as_large_as_its_layer_is_an_island_of_its_own() -> None:
    found = styles(plan_of(Pair(WIDE), torch.randn(3, C)))
    assert (found["up.a.weight"], found["up.b.weight"]) == ("colwise 0", "rowwise 1")


def test_a_users_plan_for_an_update_stays() -> None:
    found = styles(plan_of(Pair(4), torch.randn(3, C), wishes={"m.up.a": "colwise"}))
    assert (found["up.a.weight"], found["up.b.weight"]) == ("colwise 0", "rowwise 1")


class Decomposed(Updated):
    """Scales each row of the updated weight to a length that is learned, so its halves meet an identity first."""

    def __init__(self, inner: int, outer: int, rank: int) -> None:
        super().__init__(inner, outer, rank)
        self.length = nn.Parameter(torch.ones(outer))

    def forward(self, x: Tensor) -> Tensor:
        update = self.b(self.a(torch.eye(x.shape[-1]))).T
        scale = self.length / torch.linalg.norm(self.base.weight + update.detach(), dim=1).detach()
        return (self.base(x) + self.b(self.a(x))) * scale.view(1, -1)


def test_a_weight_that_first_meets_a_whole_tensor_is_split_by_what_it_meets_later() -> None:
    module = Pair(2)
    module.up, module.down = Decomposed(C, WIDE, 2), Decomposed(WIDE, C, 2)
    plan = plan_of(module, torch.randn(3, C))
    assert styles(plan) == BASE | {
        "up.b.weight": "colwise 0", "up.length": "colwise 0", "down.a.weight": "rowwise 1",
    }  # fmt: skip
    assert not plan.gathers


class Scaled(nn.Module):
    """Vectors that scale split features, one of them reshaped, and one used outside of the island."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, WIDE), nn.Linear(WIDE, C)
        self.flat, self.column = nn.Parameter(torch.ones(WIDE)), nn.Parameter(torch.ones(WIDE, 1))
        self.outside = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 * self.column.flatten()
        return self.down(F.relu(self.up(x)) * self.flat * scale) * self.outside


def test_vectors_that_scale_split_features_are_split_with_them() -> None:
    plan = plan_of(Scaled(), torch.randn(3, C))
    whole = {"down.bias", "outside"}
    assert styles(plan) == {
        "up.weight": "colwise 0", "up.bias": "colwise 0", "flat": "colwise 0", "column": "colwise 0",
        "down.weight": "rowwise 1",
    }  # fmt: skip
    assert reasons(plan).keys() == whole
    positions = [splits(plan)[name].positions.owner.tolist() for name in ("up.weight", "flat", "column")]
    assert positions[0] == positions[1] == positions[2]


def test_a_vector_that_the_user_wants_whole_stays_whole() -> None:
    plan = plan_of(Scaled(), torch.randn(3, C), wishes={"m.flat": "replicate"})
    assert "flat" not in styles(plan) and "column" in styles(plan)
