"""How long messages take: rings over the links of a host and the network between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_par.planner.machine.machines import Machine

Verb = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True)
class Group:
    """Ranks that send to one another.

    Attributes:
        size: how many.
        inside: how many of them are on one host.
    """

    size: int
    inside: int

    @property
    def hosts(self) -> int:
        return -(-self.size // self.inside)


def group_of(size: int, stride: int, devices: int) -> Group:
    """``size`` ranks that are ``stride`` apart, with ``devices`` on each host.

    Example::

        assert group_of(16, 4, 8) == Group(16, 2)
    """
    return Group(size, max(1, min(size, devices // stride)))


def message_time(verb: Verb, nbytes: float, group: Group, machine: Machine) -> float:
    """Seconds of one collective of ``nbytes`` in all, as a ring that crosses each host's border once a port."""
    if group.size < 2 or not nbytes:
        return 0.0
    share = (group.size - 1) / group.size
    moved = nbytes * (2 * share if verb == "all_reduce" else 1.0 if verb == "send" else share)
    steps = 1 if verb == "send" else (group.size - 1) * (2 if verb == "all_reduce" else 1)
    inside, outside = machine.link, machine.network
    moved /= {"all_gather": inside.gather, "reduce_scatter": inside.scatter}.get(verb, 1.0)
    if group.hosts == 1:
        return _moved(moved, nbytes, inside.bandwidth, inside.ramp) + steps * inside.latency
    # Every device of the group on a host has a port of its own, over which its part of the ring goes.
    if verb == "send":
        return moved / outside.bandwidth + outside.latency
    bandwidth = min(inside.bandwidth, outside.bandwidth * group.inside) if group.inside > 1 else outside.bandwidth
    latency = group.hosts * outside.latency + (group.size - group.hosts) * inside.latency
    return _moved(moved, nbytes, bandwidth, outside.ramp * group.inside) + latency * (2 if verb == "all_reduce" else 1)


def _moved(moved: float, nbytes: float, bandwidth: float, ramp: float) -> float:
    return moved / bandwidth * (1 + ramp / max(nbytes, 1.0))
