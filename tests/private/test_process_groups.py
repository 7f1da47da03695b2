"""How ranks are connected, and what their connection says."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_par.private.fake_groups import begin_fake_world
from lightning_par.private.process_groups import (
    closed_by_peer,
    default_store,
    functional_collectives,
    has_gloo,
    host_of_store,
    init_process_group,
    is_fake,
    is_of_all_processes,
    kind_without_hosts,
    number_of_groups,
    splits,
    start_receive,
    start_send,
    tells_of_a_lost_peer,
    timed_out,
    underlying_store,
)
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_a_process_group_is_made_with_our_arguments(namespace: Namespace) -> None:
    environment = namespace.from_fabric("plugins.environments", "LightningEnvironment")()
    environment.set_world_size(1)
    try:
        init_process_group(namespace, environment, "gloo", timedelta(seconds=5), torch.device("cpu"))
        assert torch.distributed.get_backend() == "gloo"
        default_store().set("key", "value")
        assert default_store().get("key") == b"value"
        assert host_of_store() == (environment.main_address, environment.main_port)
        assert isinstance(underlying_store(), dist.TCPStore)
    finally:
        torch.distributed.destroy_process_group()


def test_groups_are_counted_as_their_names_count_them() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert number_of_groups() == 1 and not splits(dist.group.WORLD)
        dist.new_group([0], use_local_synchronization=True)
        assert number_of_groups() == 2
    finally:
        dist.destroy_process_group()


def test_functional_collectives_are_those_that_take_a_group() -> None:
    from torch.distributed import _functional_collectives as functional

    found = functional_collectives()
    assert functional.all_reduce in found and functional.all_gather_tensor in found
    assert functional.wait_tensor not in found
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one = dist.new_group([0])
        assert one is not None
        groups = [dist.group.WORLD, dist.group.WORLD.group_name, [0], one, one.group_name]  # type: ignore[union-attr]
        assert [*map(is_of_all_processes, groups)] == [True, True, True, False, False]
    finally:
        dist.destroy_process_group()


def two_ranks() -> dict[int, dist.ProcessGroupGloo]:
    store, groups = dist.HashStore(), {}
    connect = lambda rank: groups.update({rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=1))})  # noqa: E731
    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def test_who_carries_messages_of_a_kind_of_device_is_known() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert has_gloo(None, "cpu") and has_gloo(dist.group.WORLD, "cpu") and not has_gloo(None, "cuda")
    finally:
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert has_gloo(None, "cpu") and has_gloo(None, "cuda") and kind_without_hosts(None) is None
    finally:
        dist.destroy_process_group()
    assert str(dist.distributed_c10d.BackendConfig(dist.Backend("nccl"))) == "cuda:nccl"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16])
def test_messages_of_any_dtype_find_each_other_by_their_tags(dtype: torch.dtype) -> None:
    groups = two_ranks()
    sent = [torch.tensor([number, 0, 1]).to(dtype) for number in range(2)]
    works = [start_send(groups[0], x, 1, tag) for tag, x in enumerate(sent)]
    received = [torch.empty(3, dtype=dtype) for _ in sent]
    works += [start_receive(groups[1], received[tag], 0, tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    assert all(map(torch.equal, received, sent))


def test_errors_of_lost_peers_are_known() -> None:
    groups = two_ranks()
    for _ in range(2):  # who does not answer first, later has closed the connection
        with pytest.raises(RuntimeError) as caught:
            groups[0].recv([torch.ones(1)], 1, 0).wait(timedelta(milliseconds=10))
        assert tells_of_a_lost_peer(caught.value)
        assert timed_out(caught.value) and not closed_by_peer(caught.value)
    with pytest.raises(RuntimeError) as caught:  # whose process has not ended
        groups[1].recv([torch.ones(1)], 0, 0).wait(timedelta(seconds=10))
    assert closed_by_peer(caught.value) and not timed_out(caught.value)
    with pytest.raises(dist.DistStoreError) as caught:
        dist.HashStore().wait(["nothing"], timedelta(milliseconds=10))
    assert tells_of_a_lost_peer(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) + torch.ones(3)
    assert not tells_of_a_lost_peer(caught.value)


def test_a_group_in_which_nothing_moves_is_known_and_one_that_torch_does_not_know_is_none() -> None:
    begin_fake_world(3, 8, timedelta(minutes=1))
    try:
        assert is_fake(dist.group.WORLD) and is_fake(dist.new_group([1, 3]))
    finally:
        dist.destroy_process_group()
    assert not is_fake(None) and not is_fake(object())
