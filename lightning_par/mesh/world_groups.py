"""Process groups, made once for each world and handed to one run after another.

To make one takes time, and what is no longer used is never given back: a gloo group keeps three threads that poll. So
groups outlive a run, but hold nothing of it: the `Axis` around a group is made anew for each run. With the world that
they are of, as ``torch.distributed.destroy_process_group`` ends it, they are let go.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist

_Key = tuple[tuple[int, ...], str, str | None, timedelta | None]
_timeouts: weakref.WeakKeyDictionary[dist.ProcessGroup, timedelta | None] = weakref.WeakKeyDictionary()
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
        _timeouts[world] = timeout
        return world
    made = _of_world.setdefault(world, {})
    key = ranks, purpose, backend, timeout
    if key not in made:
        made[key] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:  # else it is a number that stands for no group
            _timeouts[made[key]] = timeout
    return made[key]


def on_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks, connected by their hosts' memory: to read what came that way no rank waits for its device.

    Made when it is first asked for, which all ranks of ``group``, and no others, must do at the same point.

    Example::

        assert on_host(process_group((0, 1), timedelta(minutes=30))) is not None
    """
    if "cpu:" in str(dist.get_backend_config(group)):  # as "cpu:gloo,cuda:nccl"
        return group
    if group not in _on_host:
        ranks = dist.get_process_group_ranks(group)
        _on_host[group] = dist.new_group(
            ranks, timeout=_timeouts.get(group), backend="gloo", use_local_synchronization=True
        )
    return _on_host[group]
