"""Process groups, made once for each world and handed to one run after another.

To make one takes time, and what is no longer used is never given back: a gloo group keeps three threads that poll. So
groups outlive a run, but hold nothing of it: the `Axis` around a group is made anew for each run. With the world that
they are of, as ``torch.distributed.destroy_process_group`` ends it, they are let go.

A rank makes those that it is in and no others: at 1,024 ranks there are hundreds of lines along each axis. NCCL splits
the world's communicator into all lines of an axis at once; other backends connect the ranks of each line by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_par.private.process_groups import is_fake, number_of_groups, splits

Lines = tuple[tuple[int, ...], ...]
"""Sets of global ranks, ascending, of which none has a rank in common with another."""
_Key = tuple[Lines, str, str | None, timedelta | None]
_on_host: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_of_world: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup | None]] = (
    weakref.WeakKeyDictionary()
)


def process_group(
    lines: Sequence[tuple[int, ...]], timeout: timedelta | None, purpose: str = "", backend: str | None = None
) -> dist.ProcessGroup | None:
    """The group of that of ``lines`` which this rank is in. All ranks of the world must call it, in the same order.

    Args:
        lines: ascending global ranks, the same on all ranks; no rank is in two of them.
        timeout: of what it does.
        purpose: of a group that is not to be shared with what is done for another purpose.
        backend: the world's by default.

    Returns:
        The group; None where this rank is in no line.

    Example::

        group = process_group([(0, 1), (2, 3)], timedelta(minutes=30))
        assert process_group([(0, 1), (2, 3)], timedelta(minutes=30)) is group
    """
    world = dist.group.WORLD
    assert world is not None
    if not purpose and len(lines[0]) == dist.get_world_size():
        return world
    made = _of_world.setdefault(world, {})
    key = tuple(lines), purpose, backend, timeout
    if key not in made:
        made[key] = _make(world, key[0], timeout, purpose, backend)
    return made[key]


def connect_hosts(lines: Sequence[tuple[int, ...]], timeout: timedelta | None) -> None:
    """Make `host_group` for the groups of ``lines``. All ranks of the world must call it, in the same order.

    Example::

        connect_hosts([(0, 1), (2, 3)], timedelta(minutes=30))
    """
    if "cpu:" in str(dist.get_backend_config()):  # as "cpu:gloo,cuda:nccl"
        return
    group, hosts = process_group(lines, timeout), process_group(lines, timeout, "values of the hosts", "gloo")
    if group is not None and hosts is not None:
        _on_host[group] = hosts


def host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks of ``group`` connected by their hosts' memory: to read what came that way no rank waits for its device.
    ``group`` itself where it has a backend of the hosts, or no such twin.

    Example::

        assert host_group(group) is group  # under gloo
    """
    return None if group is None else _on_host.get(group, group)


def _make(
    world: dist.ProcessGroup, lines: Lines, timeout: timedelta | None, purpose: str, backend: str | None
) -> dist.ProcessGroup | None:
    if backend is None and splits(world):
        return dist.split_group(split_ranks=[list(line) for line in lines], timeout=timeout)
    own = next((line for line in lines if dist.get_rank() in line), None)
    if _count_alike():
        return None if own is None else _new(own, timeout, backend, alone=True)
    groups = {line: _new(line, timeout, backend, alone=False) for line in lines}
    return None if own is None else groups[own]


def _new(line: tuple[int, ...], timeout: timedelta | None, backend: str | None, alone: bool) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(
        list(line), timeout=timeout, backend=backend, use_local_synchronization=alone
    )
    return made


def _count_alike() -> bool:
    """Whether all ranks have made equally many groups, which goes into the names by which members of one find each
    other. Groups of some ranks alone, as user code makes, are in the way; then all ranks make every group."""
    if is_fake(dist.group.WORLD):
        return True
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, number_of_groups())
    return len(set(counts)) == 1
