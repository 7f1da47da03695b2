"""Windows along the sequence: values, gradients, and what moves for them."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.sequence.blocks import contiguous, zigzag
from lightning_par.sequence.halo import fetch
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.models.convolutional import CausalConv
from tests.helpers.pool import Pool
from tests.helpers.rule_check import KINDS, Case, check
from tests.helpers.slow import long, slow
from tests.helpers.thread_ranks import SequenceThreadAxis, run_ranks
from tests.rule_cases.convolution import CASES
from tests.sequence.test_counts import Books, fit

pytestmark = [pytest.mark.filterwarnings("ignore:Using padding"), pytest.mark.usefixtures("shares")]

GATHER = {"conv2d along odd", "ceiled_pool along", "uncounted_pool along", "indexed_pool along"}
GATHER |= {"conv1d along, too short"}


class Strict(SequenceThreadAxis):
    """Along it nothing gathers, but the check itself."""

    def about_to_gather(self, func: Any, x: Any) -> None:
        assert func == "full_tensor", f"{func} gathers"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_window_needs_no_gather(case: Case) -> None:
    """Unless its result lies as no other tensor does, or it is none of those that are computed by parts."""
    own_order = case.name == "conv1d causal by padding"  # the result lies as sequences do, which these did not
    gathering = KINDS if case.name in GATHER else KINDS[1:] if own_order else ()
    check(case, [kind for kind in KINDS if kind not in gathering], Strict)
    check(case, gathering, SequenceThreadAxis)
    if gathering:
        with pytest.raises(AssertionError, match="gathers"):
            check(case, gathering[:1], Strict)


def test_gradients_of_gradients_return_to_their_rows() -> None:
    positions, wanted = zigzag(8, 2), [np.array([7, 0, 1, 2, -1]), np.array([1, 2, 3, 3])]
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def twice(loss: Tensor, leaf: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    def on_rank(axis: SequenceThreadAxis) -> Tensor:
        leaf = x.detach()[positions.index(axis.rank, x.device)].requires_grad_()
        return twice(fetch(ShardedTensor(leaf, 0, positions, axis), wanted).pow(3).sum(), leaf)

    fetched = torch.from_numpy(np.concatenate([rows[rows >= 0] for rows in wanted]))
    expected = twice(x[fetched].pow(3).sum(), x)
    for rank, found in enumerate(run_ranks(2, on_rank, kind=SequenceThreadAxis)):
        torch.testing.assert_close(found, expected[positions.index(rank, x.device)])


B, T, WIDTH, KERNEL = 2, 32, 16, 4
REACHES = (KERNEL - 1, 2 * (KERNEL - 2), 1)  # tokens that its windows look back; the last one is a shift


def convolve(attention: str) -> Books:
    L.seed_everything(0, verbose=False)
    data = [(x[:-1], x[1:]) for x in torch.randint(0, 48, (4 * B, T + 1))]
    return fit(CausalConv(WIDTH, KERNEL), data, batch_size=B, attention=attention)


def rows_sent(positions: Positions, ranks: int, rank: int) -> int:
    """Rows that leave ``rank`` in forward, and gradients of rows in backward."""
    total = 0
    for reach in REACHES:
        for other in range(ranks):
            own = positions.indices(other)
            for run in np.split(own, np.flatnonzero(np.diff(own) != 1) + 1):
                owners = positions.owner[max(0, run[0] - reach) : run[0]]
                total += int((owners == rank).sum() if other != rank else (owners != rank).sum())
    return total


@long()
@slow("contiguous")
@pytest.mark.parametrize(
    ("attention", "order", "ranks"), [("ulysses", contiguous, 2), ("ring", zigzag, 4)], ids=["contiguous", "zigzag"]
)
def test_only_the_rows_at_borders_move(attention: str, order: Any, ranks: int, pool: Pool) -> None:
    for rank, books in enumerate(pool.run(ranks, convolve, attention)):
        assert books.sent("halo") == rows_sent(order(T, ranks), ranks, rank) * B * WIDTH * 4
        assert books.calls["sequence", "halo", "all_to_all"] == 2 * len(REACHES)
        assert books.gathered == ((), ())
        assert not [t for t in books.moved if t.purpose in ("gather", "scatter")]
