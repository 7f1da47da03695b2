"""The pool of ranks that the other tests stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import Pool, RanksFailedError


def _sum(n: int) -> torch.Tensor:
    dist.init_process_group("gloo")
    x = torch.full((n,), float(dist.get_rank()))
    dist.all_reduce(x)
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "1"
    return x


def _left_behind() -> tuple[bool, bool, torch.dtype]:
    return dist.is_initialized(), "LEFT_BEHIND" in os.environ, torch.get_default_dtype()


def _raise_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError("the message")
    dist.barrier()


def _hang_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        time.sleep(100)


def _die_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        os._exit(3)


def test_ranks_talk_and_results_come_back_by_rank(pool: Pool) -> None:
    results = pool.run(2, _sum, 3)
    assert [r.tolist() for r in results] == [[1.0] * 3] * 2


def test_a_run_leaves_nothing_behind(pool: Pool) -> None:
    pool.run(2, _sum, 3)
    assert pool.run(2, _left_behind) == [(False, False, torch.float32)] * 2


def test_workers_are_reused(pool: Pool) -> None:
    assert pool.run(2, os.getpid) == pool.run(2, os.getpid)


def test_an_exception_carries_the_traceback_of_its_rank(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="ValueError: the message") as caught:
        pool.run(2, _raise_on, 1)
    assert "_raise_on" in caught.value.reports[1]
    assert [r.tolist() for r in pool.run(2, _sum, 1)] == [[1.0]] * 2


def test_a_hanging_rank_is_killed_and_its_stack_shown(pool: Pool) -> None:
    pool.run(2, _sum, 1)  # starts them
    with pytest.raises(RanksFailedError) as caught:
        pool.run(2, _hang_on, 1, timeout=2)
    assert "_hang_on" in caught.value.reports[1]
    assert [r.tolist() for r in pool.run(2, _sum, 1)] == [[1.0]] * 2


def test_a_dead_rank_is_named(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="exit code 3"):
        pool.run(2, _die_on, 0)
