"""Python objects between ranks, pickled."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.private.process_groups import has_gloo

_SIZE, _ROOM = 8, 4096  # bytes: of the number that the first message begins with, and of that message


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """``value`` of the global rank ``source`` on every rank of ``group``.

    What is small travels in one message: `torch.distributed.broadcast_object_list` sends its size in one of its own.
    """
    if not has_gloo(group, "cpu"):
        box = [value]
        dist.broadcast_object_list(box, src=source, group=group)
        return box[0]
    here = dist.get_rank() == source
    data = pickle.dumps(value) if here else b""
    most = _ROOM - _SIZE
    first = _sent(len(data).to_bytes(_SIZE, "little") + data[:most], _ROOM, source, group)
    size = int.from_bytes(first[:_SIZE], "little")
    rest = b"" if size <= most else _sent(data[most:], size - most, source, group)
    return value if here else pickle.loads(first[_SIZE:] + rest)  # reads no further than to the end of what it loads


def _sent(data: bytes, size: int, source: int, group: dist.ProcessGroup | None) -> bytes:
    x = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    dist.broadcast(x, src=source, group=group)
    return x.numpy().tobytes()
