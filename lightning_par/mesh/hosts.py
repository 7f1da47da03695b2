"""Which ranks are on one host, and the order in which they fill the rank grid.

The tensor axis talks in each layer and wants a host's own links; a pipeline sends at its cuts alone, replicas once a
step. The grid is filled by rank number, so ranks are numbered host by host. torchrun does so itself. SLURM's cyclic
distribution deals tasks out to the hosts in turn, as does ``mpirun --map-by node``: there the number of a rank is
another one than its launcher gave.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from lightning_par.mesh.layout import AxisName, Layout

_NEAR: tuple[AxisName, ...] = ("tensor", "sequence", "pipeline")
"""The axes whose neighbours want to be on one host, the one that talks most first."""
_BOOT = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


@dataclass(frozen=True)
class Host:
    """Where a rank runs, as far as it can tell: ranks that tell the same are on one host.

    Attributes:
        name: of the host. Containers and virtual machines of one image may share it.
        node: the host's number by the cluster environment; -1 where that gives none.
        boot: an id that the kernel draws when it starts; empty where it does not tell.
        network: the id of the process's network namespace, which a container has of its own; empty as above.

    Example::

        assert this_host() == this_host()
    """

    name: str
    node: int = -1
    boot: str = ""
    network: str = ""


def this_host(node: int = -1) -> Host:
    """The host of this process.

    Args:
        node: as in `Host`.
    """
    boot = network = ""
    try:
        with open(_BOOT) as file:
            boot = file.read().strip()
        network = os.readlink(_NETWORK)
    except OSError:  # no Linux, or a sandbox without them
        pass
    return Host(socket.gethostname(), node, boot, network)


@dataclass(frozen=True)
class HostGrid:
    """A layout on hosts.

    Args:
        layout: the sizes of the axes.
        hosts: of each rank.
        launched: each rank's number by its launcher.

    Example::

        a, b = Host("a"), Host("b")
        grid = HostGrid.arranged(Layout(pipeline=2, tensor=2), [a, b, a, b])
        assert grid.launched == (0, 2, 1, 3) and grid.hosts == (a, a, b, b)
    """

    layout: Layout
    hosts: tuple[Host, ...]
    launched: tuple[int, ...]

    @classmethod
    def arranged(cls, layout: Layout, hosts: Sequence[Host]) -> HostGrid:
        """The grid for ranks that their launcher has put on ``hosts``, numbered by `order_by_host`."""
        order = order_by_host(layout, hosts)
        return cls(layout, tuple(hosts[rank] for rank in order), order)

    @property
    def names(self) -> dict[Host, str]:
        """What to call each host, in the order of their first ranks: those with one name get numbers."""
        distinct = [*dict.fromkeys(self.hosts)]
        alike = {host: [other for other in distinct if other.name == host.name] for host in distinct}
        return {host: host.name if len(alike[host]) == 1 else _numbered(host, alike[host]) for host in distinct}

    def ranks_of(self, host: Host) -> list[int]:
        return [rank for rank, its in enumerate(self.hosts) if its == host]

    def across(self, axis: AxisName) -> int:
        """How many groups along ``axis`` have ranks on several hosts."""
        return sum(len({self.hosts[rank] for rank in line}) > 1 for line in self.layout.lines((axis,)))


def order_by_host(layout: Layout, hosts: Sequence[Host]) -> tuple[int, ...]:
    """The launcher's number of the rank at each place of the grid.

    Groups along the tensor axis are formed within hosts, then groups of these along the sequence, of those along the
    pipeline; what is left over of hosts forms groups across them. Where the launcher's own order has no more neighbours
    on different hosts, as where it is host by host and sizes divide a host's ranks, it stays. The first rank is first.

    Args:
        layout: the sizes of the axes.
        hosts: of each rank, by its launcher's number.

    Example::

        a, b = Host("a"), Host("b")
        assert order_by_host(Layout(tensor=2, data=2), [a, b, a, b]) == (0, 2, 1, 3)
        assert order_by_host(Layout(tensor=2, data=2), [a, a, b, b]) == (0, 1, 2, 3)
    """
    as_launched = tuple(range(len(hosts)))
    first = {host: rank for rank, host in reversed([*enumerate(hosts)])}
    by_host = sorted(as_launched, key=lambda rank: (first[hosts[rank]], rank))
    units: list[tuple[int, ...]] = [(rank,) for rank in by_host]
    for axis in _NEAR:
        units = _joined(units, getattr(layout, axis), hosts, by_host)
    packed = tuple(chain(*units))
    return min(as_launched, packed, key=lambda order: _distance(layout, [hosts[rank] for rank in order]))


def _joined(
    units: list[tuple[int, ...]], size: int, hosts: Sequence[Host], by_host: Sequence[int]
) -> list[tuple[int, ...]]:
    """``units`` of ranks in groups of ``size``, as many of them on one host each as can be."""
    of_host: dict[Host, list[tuple[int, ...]]] = {}
    rest: list[tuple[int, ...]] = []
    for unit in units:
        within = len({hosts[rank] for rank in unit}) == 1
        (of_host.setdefault(hosts[unit[0]], []) if within else rest).append(unit)
    joined: list[tuple[int, ...]] = []
    for own in of_host.values():
        whole = len(own) // size * size
        joined += _chunks(own[:whole], size)
        rest += own[whole:]
    place = {rank: index for index, rank in enumerate(by_host)}
    joined += _chunks(sorted(rest, key=lambda unit: place[unit[0]]), size)
    return sorted(joined, key=lambda unit: place[unit[0]])


def _chunks(units: list[tuple[int, ...]], size: int) -> Iterable[tuple[int, ...]]:
    return [tuple(chain(*units[i : i + size])) for i in range(0, len(units), size)]


def _distance(layout: Layout, hosts: Sequence[Host]) -> tuple[int, ...]:
    """How many neighbours along each of `_NEAR` are on different hosts, with the ranks of the grid on ``hosts``."""
    return tuple(
        sum(hosts[one] != hosts[other] for line in layout.lines((axis,)) for one, other in pairwise(line))
        for axis in _NEAR
    )


def _numbered(host: Host, alike: Sequence[Host]) -> str:
    nodes = [other.node for other in alike]
    number = host.node if len({*nodes}) == len(nodes) else alike.index(host)
    return f"{host.name} ({number})"
