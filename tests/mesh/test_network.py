"""By which network hosts are joined, where a host's own name stands for its loopback address."""

from __future__ import annotations

from lightning_par.mesh.hosts import Host
from lightning_par.mesh.network import next_host_peer, routes_out

A, B, C = Host("a"), Host("b"), Host("c")


def test_the_stores_host_looks_where_the_others_are_and_they_by_their_own_way_to_it() -> None:
    hosts, routes = [A, A, B, B], ["127.0.0.1", "127.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert routes_out(0, hosts, routes) == routes_out(1, hosts, routes) == ["10.0.0.2"] * 2
    assert routes_out(2, hosts, routes) == routes_out(3, hosts, routes) == ["10.0.0.2"]
    assert routes_out(1, [A, B, C], ["10.0.0.1", "10.0.0.2", "10.0.0.3"]) == ["10.0.0.2", "10.0.0.1", "10.0.0.3"]
    assert routes_out(0, [A, B], [None, None]) == routes_out(0, [A, B], ["127.0.1.1", "::1"]) == []


def test_each_rank_looks_for_one_of_the_next_host() -> None:
    hosts = [A, B, A, B, C]
    assert [next_host_peer(rank, hosts) for rank in range(5)] == [1, 4, 3, 4, 0]
