"""Ranks of one attempt meet each other in the agent's store, and nobody of an attempt before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_par.mesh.agent_store import connect_to_agent, store_of_attempt

SOON = timedelta(seconds=20)


@pytest.fixture
def agent() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt(agent: dist.TCPStore, world_size: int) -> dict[int, dist.PrefixStore]:
    """What each rank, a thread here, gets."""
    found = {}

    def meet(rank: int) -> None:
        store = connect_to_agent("127.0.0.1", agent.port, SOON)
        found[rank] = store_of_attempt(store, rank, world_size, SOON)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == world_size
    return found


def all_reduced(stores: dict[int, dist.PrefixStore]) -> list[float]:
    sums, groups = dict[int, float](), {}

    def reduce(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, len(stores), SOON)
        x = torch.tensor([1.0 + rank])
        groups[rank].allreduce([x]).wait()
        sums[rank] = x.item()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sums[rank] for rank in sorted(sums)]


def test_ranks_make_a_gloo_group_again_and_again_in_one_agents_store(agent: dist.TCPStore) -> None:
    for world_size in (2, 3, 1, 2):
        stores = attempt(agent, world_size)
        assert not any(store.check(["left"]) for store in stores.values())
        stores[0].set("left", "by this attempt")
        assert all(store.check(["left"]) for store in stores.values())
        assert all_reduced(stores) == [world_size * (world_size + 1) / 2] * world_size


def test_a_rank_that_waited_in_an_attempt_that_ended_is_not_taken_for_the_one_that_comes_now(
    agent: dist.TCPStore,
) -> None:
    with pytest.raises(RuntimeError, match="Rank 1 waited 0 s for rank 0 to join"):
        store_of_attempt(connect_to_agent("127.0.0.1", agent.port, SOON), 1, 2, timedelta(seconds=0.1))
    stores = attempt(agent, 2)
    stores[0].set("x", "1")
    assert stores[1].get("x") == b"1"


def test_the_first_rank_names_who_does_not_come(agent: dist.TCPStore) -> None:
    attempt(agent, 2)
    with pytest.raises(RuntimeError, match="Rank 0 waited 0 s for ranks 1, 2 to join"):
        store_of_attempt(agent, 0, 3, timedelta(seconds=0.2))
