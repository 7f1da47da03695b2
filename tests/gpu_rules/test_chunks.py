"""Tokens that go in chunks beside products keep NCCL's rules, and their messages are hidden."""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh import chunked_tokens
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.chunked_tokens import Arrival, product_summed
from lightning_par.mesh.chunks import Chunks
from lightning_par.mesh.positions import Positions
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.helpers.slow import long, slow
from tests.tensor.test_chunks import RANKS, train


@long()
@slow(but=["one-queue-plain"])
@pytest.mark.parametrize("how", ["plain", "one sample", "uneven", "autocast", "checkpointed", "accumulated", "1f1b"])
@pytest.mark.parametrize("where", ["cuda", "one-queue"])
def test_chunks_break_no_rule(request: pytest.FixtureRequest, where: str, how: str) -> None:
    pool: StrictPool = request.getfixturevalue("pool" if where == "cuda" else "strict_cpu")
    if where == "one-queue":
        pool.rules = Rules(queue="rank")
    results = pool.run(RANKS.get(how, 2), train, how, True)
    assert pool.broken() == []
    for _, _, messages, _ in results:
        assert messages["tensor", "all_gather", "enter"] > messages["tensor", "reduce_scatter", "enter"]


DELAY = 0.02


def _hidden() -> tuple[float, float]:
    """The share of what four messages are late by that products hide, as tokens come and as sums leave."""
    dist.init_process_group()
    axis = Axis("tensor", (0, 1), dist.get_rank(), dist.group.WORLD)
    chunks = Chunks(1, Positions.even(8, 2), 2, True, (0, 1, 2, 3, 4))
    part, whole, weight = torch.ones(4, 4, 16), torch.ones(4, 8, 16), torch.ones(16, 16)
    made = chunked_tokens.product

    def late(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        time.sleep(DELAY * 1.5)
        made(x, weight, bias, out)

    def comes(apart: bool) -> None:
        arrival = Arrival(part, chunks, axis, "enter")
        if apart:
            arrival.finish()
            for _ in range(4):
                late(whole[0], weight, None, torch.empty(8, 16))
        else:
            arrival.product(weight)

    def leaves(apart: bool) -> None:
        if apart:
            for n in range(4):
                product_summed(whole[n : n + 1], weight, Chunks(1, chunks.positions, 2, True, (0, 1)), axis, "leave")
        else:
            product_summed(whole, weight, chunks, axis, "leave")

    def seconds(run: object, apart: bool) -> float:
        dist.barrier()
        began = time.perf_counter()
        run(apart)  # type: ignore[operator]
        return time.perf_counter() - began

    with patch.object(chunked_tokens, "product", late):
        shares = []
        for run in (comes, leaves):
            pairs = [(seconds(run, True), seconds(run, False)) for _ in range(5)]
            shares.append(statistics.median(apart - beside for apart, beside in pairs) / (4 * DELAY))
    return shares[0], shares[1]


@long()
def test_of_four_messages_three_are_hidden(strict_cpu: StrictPool) -> None:
    strict_cpu.rules = Rules(delay=DELAY, checks=False)
    for shares in strict_cpu.run(2, _hidden):
        assert min(shares) > 0.5, shares  # 0.75 at the most
