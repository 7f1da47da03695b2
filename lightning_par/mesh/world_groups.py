"""Process groups, made once for each world and handed to one run after another.

To make one takes time, and what is no longer used is never given back: a gloo group keeps three threads that poll. So
groups outlive a run, but hold nothing of it: the `Axis` around a group is made anew for each run. With the world that
they are of, as ``torch.distributed.destroy_process_group`` ends it, they are let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_Key = tuple[tuple[int, ...], str, str | None, timedelta | None]
_on_host: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_of_world: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def process_group(
    ranks: tuple[int, ...], timeout: timedelta | None, purpose: str = "", backend: str | None = None
) -> dist.ProcessGroup:
    """The group of ``ranks``, in this order. All ranks of the world must call it, in the same order.

    Args:
        ranks: global ranks.
        timeout: of what it does.
        purpose: of a group that is not to be shared with what is done for another purpose, as messages that must not
            queue up behind others.
        backend: the world's by default.

    Example::

        group = process_group((0, 1), timedelta(minutes=30))
        assert process_group((0, 1), timedelta(minutes=30)) is group
    """
    world = dist.group.WORLD
    assert world is not None
    if not purpose and len(ranks) == dist.get_world_size():
        return world
    made = _of_world.setdefault(world, {})
    key = ranks, purpose, backend, timeout
    if key not in made:
        made[key] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return made[key]


def connect_hosts(lines: Sequence[tuple[int, ...]], timeout: timedelta | None) -> None:
    """Make `host_group` for the groups of ``lines``. All ranks of the world must call it, in the same order.

    Example::

        connect_hosts([(0, 1), (2, 3)], timedelta(minutes=30))
    """
    if "cpu:" in str(dist.get_backend_config()):  # as "cpu:gloo,cuda:nccl"
        return
    for line in lines:
        hosts = process_group(line, timeout, "values of the hosts", "gloo")
        if dist.get_rank() in line:
            _on_host[process_group(line, timeout)] = hosts


def host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks of ``group`` connected by their hosts' memory: to read what came that way no rank waits for its device.
    ``group`` itself where it has a backend of the hosts, or no such twin.

    Example::

        assert host_group(group) is group  # under gloo
    """
    return None if group is None else _on_host.get(group, group)
