"""Whether the whole model fits on each rank of a host, where the ranks have held parts of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.checkpoint.disk_space import file_system, free_in
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.host_files import LEAST
from lightning_par.mesh.hosts import Host, this_host
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.tensor import leaf
from lightning_par.strategies.startup_table import bytes_text

SHARE = 0.9  # of what is free; the rest is for what gathering takes for itself


@dataclass(frozen=True)
class Room:
    """How much memory the ranks of one place need together, and how much it has left.

    Attributes:
        place: a host, or a device of one.
        needed: bytes that its ranks don't hold yet.
        free: bytes.

    Example::

        assert not Room("a host", needed=2e9, free=1e9).suffices
    """

    place: str
    needed: float
    free: float

    @property
    def suffices(self) -> bool:
        return self.needed <= SHARE * self.free

    def __str__(self) -> str:
        return f"{self.place} would need {bytes_text(self.needed)} more for it, and has {bytes_text(self.free)} left"


def shortest_room(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    device: torch.device,
    world: Axis,
    folder: str | None = None,
) -> Room:
    """Where the whole of ``module`` and its optimizers' state fits least on every rank. All ranks must call it.

    Args:
        module: of which this rank may hold parts.
        optimizers: of its parameters; their state gets whole on the host.
        device: where its parameters are.
        world: all ranks.
        folder: where files are to hold what is large of it; else the host's memory holds all.
    """
    own = this_host()
    host = own.name
    weights, states = _growth(module, optimizers)
    filed = 0.0
    if folder is not None:
        filed = _large(module) * (states + (weights if device.type == "cpu" else 0))
    asked = [(host, weights + states - filed, free_on_host())]
    if folder is not None:
        place = host if file_system(folder) in ("tmpfs", "ramfs") else f"{folder} of {host}"
        asked.append((place, filed, free_in(folder)))
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        asked.append((f"{device} of {host}", weights, torch.cuda.mem_get_info(device)[0] + unused))
    by_host: dict[Host, list[tuple[str, float, float]]] = {}  # of which some may have one name
    for its, entries in world.all_gather_object((own, asked), "memory"):
        by_host.setdefault(its, []).extend(entries)
    return min(map(least, by_host.values()), key=_spare)


def least(asked: Iterable[tuple[str, float, float]]) -> Room:
    """The place that has least left, from what each rank needs there and has found free."""
    rooms: dict[str, Room] = {}
    for place, needed, free in asked:
        known = rooms.get(place, Room(place, 0.0, inf))
        rooms[place] = Room(place, known.needed + needed, min(known.free, free))
    return min(rooms.values(), key=_spare)


def _spare(room: Room) -> float:
    return SHARE * room.free - room.needed


def _growth(module: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[float, float]:
    """Bytes of weights and gradients, and of optimizer state, that this rank does not hold yet."""
    whole = held = gradients = 0
    for x in (*module.parameters(), *module.buffers()):
        whole += x.shape.numel() * x.dtype.itemsize
        if not is_elsewhere(x):
            held += _bytes(leaf(x))
            gradients += 0 if leaf(x).grad is None else _bytes(leaf(x).grad)  # type: ignore[arg-type]
    states = sum(_bytes(x) for optimizer in optimizers for x in tensors_in([*optimizer.state.values()]))
    more = whole / held - 1 if held else 0.0
    return whole - held + more * gradients, more * states


def _large(module: nn.Module) -> float:
    """How much of the weights is in tensors that go to files."""
    sizes = [x.shape.numel() * x.dtype.itemsize for x in module.parameters()]
    return sum(size for size in sizes if size >= LEAST) / max(1, sum(sizes))


def _bytes(x: Any) -> int:
    part: Tensor = leaf(x)
    return part.numel() * part.element_size()


def free_on_host() -> float:
    """Bytes that processes of this host, or of its container, may still take; infinite where that is unknown."""
    return min(_free_of_machine(), *(_free_of_group(*names) for names in _GROUPS))


def free_on(device: torch.device) -> float:
    """Bytes that may still be taken of ``device`` and of its host."""
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else inf
    return min(on_device, free_on_host())


# The limit, what is used, and the line of memory.stat with what files take of it; for both versions of control groups.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file", "/sys/fs/cgroup"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "/sys/fs/cgroup/memory"),
)


def _free_of_machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return inf


def _free_of_group(limit: str, used: str, files: str, folder: str) -> float:
    try:
        most, now = (float((Path(folder) / name).read_text()) for name in (limit, used))  # "max" is no number
        stat = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
        return max(0.0, most - now + float(stat.get(files, 0)))
    except (OSError, ValueError):
        return inf
