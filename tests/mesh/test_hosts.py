"""The order of ranks by host: what it keeps together, and when it leaves the launcher's own."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from lightning_par.mesh.hosts import Host, HostGrid, order_by_host, this_host
from lightning_par.mesh.layout import Layout

A, B, C = Host("a"), Host("b"), Host("c")


def _layouts(world: int) -> list[Layout]:
    sizes = itertools.product((1, 2, 4), repeat=3)
    return [Layout(world // (p * s * t), p, s, t) for p, s, t in sizes if world % (p * s * t) == 0]


@pytest.mark.parametrize(("count", "each"), [*itertools.product((1, 2, 3), (1, 2, 4, 8))])
def test_ranks_that_are_numbered_by_host_stay_where_sizes_divide_a_hosts_ranks(count: int, each: int) -> None:
    hosts = [Host(f"{rank // each}") for rank in range(count * each)]
    for layout in _layouts(len(hosts)):
        if each % (layout.tensor * layout.sequence * layout.pipeline) == 0 or layout.tensor % each == 0:
            assert order_by_host(layout, hosts) == tuple(range(len(hosts))), layout


@pytest.mark.parametrize(("count", "each"), [*itertools.product((2, 3), (2, 4, 8))])
def test_ranks_dealt_out_in_turn_share_a_host_along_tensor_and_sequence(count: int, each: int) -> None:
    hosts = [Host(f"{rank % count}") for rank in range(count * each)]
    for layout in _layouts(len(hosts)):
        grid = HostGrid.arranged(layout, hosts)
        if each % layout.tensor == 0:
            assert grid.across("tensor") == 0, layout
        if each % (layout.tensor * layout.sequence) == 0:
            assert grid.across("sequence") == 0, layout
        if each % (layout.tensor * layout.sequence * layout.pipeline) == 0:
            assert grid.across("pipeline") == 0, layout


def test_neighbours_of_a_sequence_that_is_longer_than_a_host_are_on_one() -> None:
    """Ulysses takes neighbours, and a ring then goes once from host to host."""
    grid = HostGrid.arranged(Layout(sequence=4), [A, B, A, B])
    assert grid.hosts == (A, A, B, B) and grid.launched == (0, 2, 1, 3)


@pytest.mark.parametrize(
    ("hosts", "within"),
    [
        ([A, B, B, A], 2),
        ([A, B, B, C], 1),  # the first rank's group can't be on one host, and begins with it nonetheless
        ([B, A, A, A, B, B], 2),
        ([A, A, A, B, B, B, C, C], 3),
        ([A, B, C, A, B, C, A, B], 3),
        ([A, B], 0),
    ],
)
def test_uneven_hosts_hold_as_many_tensor_groups_as_they_can(hosts: list[Host], within: int) -> None:
    grid = HostGrid.arranged(Layout(data=len(hosts) // 2, tensor=2), hosts)
    assert len(hosts) // 2 - grid.across("tensor") == within
    assert grid.launched[0] == 0 and sorted(grid.launched) == [*range(len(hosts))]


def test_any_hosts_give_an_order_that_begins_with_the_first_rank() -> None:
    draw = random.Random(0)
    for _ in range(100):
        world = draw.choice((4, 6, 8, 12))
        hosts = [draw.choice((A, B, C)) for _ in range(world)]
        layout = draw.choice(_layouts(world))
        order = order_by_host(layout, hosts)
        assert order[0] == 0 and sorted(order) == [*range(world)], (layout, hosts)
        most = sum(hosts.count(host) // layout.tensor for host in (A, B, C))
        assert world // layout.tensor - HostGrid.arranged(layout, hosts).across("tensor") <= most


def test_containers_of_one_name_are_hosts_of_their_own() -> None:
    one, other = Host("app", 0, "boot", "net:[1]"), Host("app", 1, "boot", "net:[2]")
    grid = HostGrid.arranged(Layout(tensor=2, data=2), [one, other, one, other])
    assert grid.names == {one: "app (0)", other: "app (1)"} and grid.ranks_of(other) == [2, 3]
    clones = replace(one, network=""), replace(one, network="x")
    assert {*HostGrid.arranged(Layout(data=2), clones).names.values()} == {"app (0)", "app (1)"}


def test_two_looks_at_this_host_are_one() -> None:
    assert this_host(3) == this_host(3) != this_host(4) and this_host().name
