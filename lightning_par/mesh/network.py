"""How ranks on several hosts are brought together: by host, at addresses that reach each other.

Ranks meet at their store, and tell where they run; from it each knows its place in the grid. Then each connects to one
rank of the next host at the very address that gloo will use, which takes a message's time, where a connection that
can't be made would take a process group's timeout.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta

from torch.distributed import Store

from lightning_par.mesh.hosts import Host, HostGrid, this_host
from lightning_par.mesh.interfaces import (
    GLOO,
    address_towards,
    addresses,
    gloo_address,
    interface_of,
    is_loopback,
    wrong_interface,
)
from lightning_par.mesh.layout import Layout
from lightning_par.mesh.rendezvous import Address, Rendezvous

_PATIENCE = 20.0  # seconds to connect to another host


@dataclass(frozen=True)
class Joined:
    """What a rank knows once all have met.

    Attributes:
        grid: the layout on the hosts.
        rank: of this process, by its place in the grid.
        store: for the process group of all ranks.
    """

    grid: HostGrid
    rank: int
    store: Store


def meet(address: Address, rank: int, layout: Layout, node: int, backend: str, timeout: timedelta) -> Joined:
    """Bring the ranks of a job together. All ranks must call it.

    Args:
        address: where the first rank, or the launcher, serves the ranks' store.
        rank: this process' number by its launcher.
        layout: the sizes of the axes.
        node: the number of this process's host by the cluster environment.
        backend: of the process group to come.
        timeout: for how long ranks wait for each other.

    Raises:
        RuntimeError: a rank did not come, names an interface that its host lacks, or can't reach another host.

    Example::

        joined = meet(Address("localhost", 29500), 0, Layout(), 0, "gloo", timedelta(minutes=1))
        assert joined.rank == 0
    """
    rendezvous = Rendezvous(address, rank, layout.world_size, timeout)
    rendezvous.agree("interfaces", wrong_interface(backend))
    hosts = [Host(*told) for told in rendezvous.exchange("hosts", astuple(this_host(node)))]
    if len({*hosts}) > 1:
        _listen_where_others_reach(rendezvous, hosts)
        _reach_next_host(rendezvous, hosts)
    grid = HostGrid.arranged(layout, hosts)
    return Joined(grid, grid.launched.index(rank), rendezvous.store)


def _listen_where_others_reach(rendezvous: Rendezvous, hosts: Sequence[Host]) -> None:
    """Where this host's name means to gloo the host that says it, let gloo have the interface that leads to others.

    The store's own host may know the store by the loopback address, too: it looks where the others are.
    """
    routes = rendezvous.exchange("routes", _own_address(rendezvous.address.host))
    if os.environ.get(GLOO) or not is_loopback(gloo_address()):
        return
    ways = (_own_address(route) for route in routes_out(rendezvous.rank, hosts, routes))
    found = next(filter(None, (interface_of(here) for here in ways if here and not is_loopback(here))), None)
    if found is not None:
        os.environ[GLOO] = found


def routes_out(rank: int, hosts: Sequence[Host], routes: Sequence[str | None]) -> list[str]:
    """Addresses on the network that joins the hosts, the rank's own first; none that means the host that says it.

    Args:
        rank: this process' number by its launcher.
        hosts: of each rank.
        routes: each rank's address on its way to the store; None where no way leads there.

    Example::

        a, b = Host("a"), Host("b")
        assert routes_out(1, [a, b], ["127.0.0.1", "10.0.0.2"]) == ["10.0.0.2"]
    """
    elsewhere = [route for route, host in zip(routes, hosts) if host != hosts[rank]]
    return [route for route in (routes[rank], *elsewhere) if route and not is_loopback(route)]


def _own_address(towards: str) -> str | None:
    with suppress(OSError):
        return address_towards(towards, 1)
    return None


def _reach_next_host(rendezvous: Rendezvous, hosts: Sequence[Host]) -> None:
    """Connect to a rank of the next host, in turn.

    Raises:
        RuntimeError: a rank could not, on all ranks.
    """
    address = gloo_address()
    try:
        server = socket.create_server((address, 0), family=_family(address), backlog=len(hosts))
    except OSError:
        rendezvous.exchange("listeners", None)
        return rendezvous.agree("network", f"gloo can't listen at {address}, the address of {_named_by()}. {_advice()}")
    with server:
        told = rendezvous.exchange("listeners", [address, server.getsockname()[1]])
        peer = next_host_peer(rendezvous.rank, hosts)
        error = None if told[peer] is None else _unreached(peer, hosts[peer].name, *told[peer])
        rendezvous.agree("network", error)


def next_host_peer(rank: int, hosts: Sequence[Host]) -> int:
    """The rank on the next host that ``rank`` looks for.

    Example::

        a, b = Host("a"), Host("b")
        assert [next_host_peer(rank, [a, a, b]) for rank in range(3)] == [2, 2, 0]
    """
    distinct = [*dict.fromkeys(hosts)]
    own = hosts[rank]
    following = distinct[(distinct.index(own) + 1) % len(distinct)]
    place = [one for one, host in enumerate(hosts) if host == own].index(rank)
    there = [one for one, host in enumerate(hosts) if host == following]
    return there[place % len(there)]


def _unreached(peer: int, name: str, address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), _PATIENCE).close()
        return None
    except OSError as error:
        why = error.strerror or str(error)
    return (
        f"can't reach rank {peer} on host {name!r} at {address}, port {port}, where gloo listens there: {why}. Let the "
        f"firewall pass TCP between the hosts, on all ports. Or name on each host the interface of the network that "
        f"joins them: here gloo uses the address of {_named_by()}. {_advice()}"
    )


def _named_by() -> str:
    asked = os.environ.get(GLOO)
    return f"{GLOO}={asked!r}" if asked else f"the host's name, {socket.gethostname()!r}"


def _advice() -> str:
    there = [f"{name} ({own[0]})" for name, own in addresses().items() if own and not is_loopback(own[0])]
    return f"Write {GLOO}=NAME; here are: {', '.join(there) or 'none but the loopback interface'}."


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
