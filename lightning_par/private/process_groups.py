"""How ranks are connected, and what their connection says."""

from __future__ import annotations

import atexit
import time
import types
from datetime import timedelta
from typing import Any

import torch

from lightning_par.strategies.namespace import Namespace


def init_process_group(
    namespace: Namespace,
    environment: Any,
    backend: str,
    timeout: timedelta | None,
    device: torch.device,
    rank: int | None = None,
    store: torch.distributed.Store | None = None,
) -> None:
    """Connect the ranks as Lightning's own strategies do: with its log line, its reuse of a group that an earlier
    Trainer left, and its clean-up of NCCL at exit. Lightning has no public function for it.

    Where the ranks have met at a ``store``, this process is number ``rank`` of them; else as the ``environment`` says.
    """
    connect = namespace.from_fabric("utilities.distributed", "_init_dist_connection")
    kwargs: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if store is not None:
        kwargs |= {"store": store, "global_rank": rank}
    connect(environment, backend, device_id=device if device.type != "cpu" else None, **kwargs)
    if backend != "nccl":  # Lightning sees to NCCL alone
        atexit.unregister(_close_process_group)
        atexit.register(_close_process_group)


def _close_process_group() -> None:
    """Gloo's worker threads let go of the last message's tensors some time after it has arrived, for which they need
    the interpreter. One that is about to end kills the thread that asks for it, and C++ then aborts the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    time.sleep(0.1)


def splits(world: Any) -> bool:
    """Whether groups are split off the ``world``'s communicator, as NCCL does once it is bound to a device; then all
    ranks of the world must split it together. No public function says whether `torch.distributed.split_group` works."""
    device = world.bound_device_id
    return device is not None and bool(world._get_backend(device).supports_splitting)


def has_gloo(group: Any, kind: str) -> bool:
    """Whether gloo carries what a group's devices of ``kind`` send each other."""
    config = str(torch.distributed.get_backend_config(group))  # as "cpu:gloo,cuda:nccl"
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    return backends.get(kind, config) == "gloo"


def is_fake(group: Any) -> bool:
    """Whether a group is one of torch's own "fake" backend, which sends nothing."""
    backend, _ = torch.distributed.distributed_c10d._world.pg_map.get(group, ("", None))
    return bool(backend == "fake")  # nor is one that torch does not know


def kind_without_hosts(group: Any) -> str | None:
    """The kind of devices, as "cuda" under NCCL, whose memory a group carries, where it carries none of the hosts'."""
    kinds = [part.split(":")[0] for part in str(torch.distributed.get_backend_config(group)).split(",")]
    return None if "cpu" in kinds else kinds[0]


def start_send(group: Any, x: torch.Tensor, peer: int, tag: int) -> torch.distributed.Work:
    """`torch.distributed.isend` to a group's own rank ``peer``, which asks of group, rank and tensor what is known of
    a ring's next hop; its documented name costs more than the message."""
    return group.send([x], peer, tag)  # type: ignore[no-any-return]


def start_receive(group: Any, x: torch.Tensor, peer: int, tag: int) -> torch.distributed.Work:
    """`torch.distributed.irecv`; see `start_send`."""
    return group.recv([x], peer, tag)  # type: ignore[no-any-return]


def number_of_groups() -> int:
    """How many groups this process has: `torch.distributed.new_group` with ``use_local_synchronization`` names a group
    by its ranks and this number, and so needs it to be the same on them."""
    from torch.distributed.distributed_c10d import _world

    return len(_world.pg_names)


def default_store() -> Any:
    """The key-value store that the ranks met at; torch gives no public way to it, and a second one needs a port."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def underlying_store() -> Any:
    """That store without what is put before names in it, by which ranks of an attempt before, too, find what they
    left."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def host_of_store() -> tuple[str, int]:
    """Where that store is: host and port, by which every rank can be reached; this host where it is in a file."""
    store = underlying_store()
    return getattr(store, "host", "localhost"), getattr(store, "port", 1)


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` says only that another rank does not answer, or no longer: gloo's have no class of their own,
    but the file that they come from, all but one."""
    gloo = type(error) is RuntimeError and any(mark in str(error) for mark in ("gloo/", "caused pair closure"))
    return gloo or isinstance(error, torch.distributed.DistError)


def timed_out(error: BaseException) -> bool:
    """Whether ``error`` says that an operation has not ended in time, which says nothing of the process there."""
    return any(mark in str(error) for mark in ("Timed out waiting", "Application timeout caused", "Watchdog caught"))


def closed_by_peer(error: BaseException) -> bool:
    """Whether ``error`` says that the other side has closed the connection: when its process ends, but on gloo also
    when an operation of its own has not ended in time."""
    marks = ("Connection closed by peer", "onnection reset by peer", "Broken pipe", "remote process exited")
    return any(mark in str(error) for mark in marks)


def functional_collectives() -> list[types.FunctionType]:
    """Those of torch's functional collectives that take a ``group``; it has no public ones."""
    from torch.distributed import _functional_collectives as functional

    found = [x for x in vars(functional).values() if isinstance(x, types.FunctionType)]
    own = [x for x in found if x.__module__ == functional.__name__ and not x.__name__.startswith("_")]
    return [x for x in own if "group" in x.__code__.co_varnames[: x.__code__.co_argcount]]


def is_of_all_processes(group: Any) -> bool:
    """Whether functional collectives take ``group`` to be all processes, or some by their numbers, as by a list."""
    world = torch.distributed.group.WORLD
    return group in (None, world) or isinstance(group, list) or world is not None and group == world.group_name
