"""What a part draws within `WholeDraws` is its part of what is drawn for the whole, and the generator moves on so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.program.event_draws import DrawLog, Drawn, draw_again
from lightning_par.sharded.whole_draws import InexactDrawError, WholeDraws

OWNERS = {"even": (0, 0, 0, 1, 1, 1), "uneven": (0, 0, 0, 0, 0, 1), "mixed": (0, 1, 1, 0, 1, 0)}


class Draw(NamedTuple):
    """A function of a part (6 of dim 0, 8, ...) of a tensor; the dims that may be cut, and where what is drawn is."""

    run: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] = (6, 8, 10)
    dims: dict[int, int] = {0: 0, 1: 1}


NET = nn.LSTM(8, 4, num_layers=3, dropout=0.4).double()


def _lstm(x: Tensor) -> Tensor:
    return NET(x.transpose(0, 1))[0].transpose(0, 1)  # type: ignore[no-any-return]


def _attention(x: Tensor) -> Tensor:
    return F.multi_head_attention_forward(
        x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), 8, 2, torch.full((24, 8), 0.1, dtype=x.dtype), None,
        None, None, False, 0.4, torch.eye(8, dtype=x.dtype), None,
    )[0].transpose(0, 1)  # fmt: skip


DRAWS: dict[str, Draw] = {
    "dropout": Draw(lambda x: F.dropout(x, 0.4)),
    "dropout_turned": Draw(lambda x: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1), dims={0: 1, 1: 0}),
    "alpha_dropout": Draw(lambda x: F.alpha_dropout(x, 0.4, True)),
    "dropout2d": Draw(lambda x: F.dropout2d(x, 0.4), (6, 8, 3, 3)),
    "feature_alpha_dropout": Draw(lambda x: F.feature_alpha_dropout(x, 0.4, True), (6, 8, 3, 3)),
    "gumbel_softmax": Draw(lambda x: F.gumbel_softmax(x, dim=-1)),
    "randn_like": Draw(torch.randn_like),
    "randint_like": Draw(lambda x: torch.randint_like(x, 9)),
    "normal": Draw(lambda x: torch.normal(x, 0.5)),
    "bernoulli": Draw(lambda x: torch.bernoulli(x.sigmoid())),
    "bernoulli_of_a_tensor": Draw(lambda x: torch.empty_like(x).bernoulli_(x.sigmoid())),
    "uniform_": Draw(lambda x: x.clone().uniform_()),
    "multinomial": Draw(lambda x: torch.multinomial(x.sigmoid(), 3), (6, 8), {0: 0}),
    "multinomial_again": Draw(lambda x: torch.multinomial(x.sigmoid(), 20, True), (6, 8), {0: 0}),
    "scaled_dot_product_attention": Draw(
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4), (6, 8, 5, 4)
    ),
    "lstm": Draw(_lstm, (6, 5, 8), {0: 1}),
    "multi_head_attention_forward": Draw(_attention, (6, 5, 8), {0: 0}),
    "rand": Draw(lambda x: torch.rand(len(x), 4), dims={0: 0}),
    "native_dropout": Draw(lambda x: torch.native_dropout(x, 0.4, True)[0]),
}
ROWS = [(name, dim, kind) for name, draw in DRAWS.items() for dim in draw.dims for kind in OWNERS]


@pytest.mark.parametrize(("name", "dim", "kind"), ROWS, ids=lambda x: str(x))
def test_a_part_has_its_part(name: str, dim: int, kind: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(0)
    x = torch.randn(draw.shape, dtype=torch.float64)
    owner = OWNERS[kind] if dim == 0 else (*OWNERS[kind], 1, 0)
    positions = Positions.of(owner)
    torch.manual_seed(3)
    whole = draw.run(x)
    stands = torch.get_rng_state()
    for rank in (0, 1):
        index = positions.index(rank, torch.device("cpu"))
        torch.manual_seed(3)
        with WholeDraws(draw.dims[dim], positions, rank):
            part = draw.run(x.index_select(dim, index))
        expected = whole.index_select(dim, index)
        assert torch.allclose(part.double(), expected.double(), rtol=0, atol=1e-12)
        assert torch.equal(torch.get_rng_state(), stands)


def test_what_draws_more_or_fewer_numbers_by_values_is_refused() -> None:
    with WholeDraws(0, Positions.of([0, 1]), 0), pytest.raises(InexactDrawError, match="`poisson`.*'per_shard'"):
        torch.poisson(torch.ones(1))


def test_cuts_within_one_another_are_parts_of_parts() -> None:
    rows, columns = Positions.of([0, 1, 0, 1]), Positions.of([0, 0, 0, 1, 1, 1])
    torch.manual_seed(3)
    whole = torch.rand(4, 6)
    torch.manual_seed(3)
    with WholeDraws(0, rows, 1), WholeDraws(1, columns, 0):
        part = torch.empty(2, 3).uniform_()
    assert torch.equal(part, whole[[1, 3]][:, :3])


@pytest.mark.parametrize("name", DRAWS)
def test_generators_move_on_without_values(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(DRAWS[name].shape, dtype=torch.float64)
    found: list[Drawn] = []
    with DrawLog(found):
        torch.manual_seed(3)
        DRAWS[name].run(x)
        stands = torch.get_rng_state()
    torch.manual_seed(3)
    draw_again(found)
    assert found and torch.equal(torch.get_rng_state(), stands)
