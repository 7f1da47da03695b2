"""Whether the ranks that store parts of the same weights come to them in one order, and write the same into them.

Messages along an axis meet in the order in which each rank sends them. Where replicas take different branches, parts of
two weights of one size would be joined without a word; and where they write to a weight what they have made of their
own batches, parts of what each wrote would be kept. So what each has come to and has written is compared once a step,
before the optimizer writes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from lightning_par.mesh.digest import digest
from lightning_par.mesh.host_values import agreed
from lightning_par.private.modes import no_modes

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis

MOST = 4096
"""Messages that are kept to name the first that differs."""


@dataclass(frozen=True, order=True)
class Write:
    """What user code has written into a weight: the hashes of what it was given, and at which line.

    Hosts may keep one file in different folders: lines are told, not compared.
    """

    name: str
    hashes: tuple[int, ...]
    line: str = field(compare=False)


class GatherOrder:
    """The messages of weights and of their gradients along one axis since they were compared, and what was written.

    Example::

        order = GatherOrder()
        order.note("layers.0.weight")
        found = axis.all_reduce_(torch.tensor(order.told(), dtype=torch.uint8), "order", "max").tolist()
        order.compare(found, axis)
    """

    def __init__(self) -> None:
        self._hash = 0
        self._met: deque[str] = deque(maxlen=MOST)
        self._writes: deque[tuple[str, str, list[Tensor | int]]] = deque(maxlen=MOST)

    def note(self, name: str) -> None:
        """A message of the weight ``name``, or of a block that begins with it, is about to leave."""
        self._hash = crc32(name.encode(), self._hash)
        self._met.append(name)

    def note_write(self, name: str, line: str, values: Iterable[Any]) -> None:
        """User code writes into a weight what it makes of ``values``; the order of writes is not compared.

        Args:
            name: of the weight, to the reader.
            line: where.
            values: plain tensors, and what prints alike on all ranks.
        """
        with no_modes():  # no function of the step's
            hashes = [_hash_of(x) if isinstance(x, Tensor) else crc32(repr(x).encode()) for x in values]
        self._writes.append((name, line, hashes))  # read when they are told: once, and late

    @property
    def is_empty(self) -> bool:
        return not self._met

    def told(self) -> list[int]:
        """Bytes of which the most over all ranks show whether all have told the same."""
        written = sum(crc32(repr((one.name, one.hashes)).encode()) for one in self._written())
        own = [*((self._hash + written) % (1 << 32)).to_bytes(4, "little")]
        return [*own, *(255 - byte for byte in own)]

    def _written(self) -> list[Write]:
        return [Write(name, tuple(int(x) for x in values), line) for name, line, values in self._writes]

    def compare(self, most: Sequence[float], axis: Axis) -> None:
        """Begin anew, after all ranks of ``axis`` have `told`; all of them come here.

        Args:
            most: of each byte, the most over the ranks.
            axis: theirs.

        Raises:
            RuntimeError: they have come to different weights, or have written other values; on all ranks.
        """
        met, self._met, self._hash = self._met, deque(maxlen=MOST), 0
        half = len(most) // 2
        differ = any(a + b != 255 for a, b in zip(most[:half], most[half:]))
        written = self._written() if differ else []
        self._writes.clear()
        if differ:
            orders, writes = zip(*axis.all_gather_object(([*met], written), "order"))
            alike = all(order == orders[0] for order in orders)
            raise RuntimeError(_written_apart(writes, axis) if alike else _differ(orders, axis))

    def ask(self, axis: Axis) -> None:
        """`told` and `compare` in a message of their own. All ranks of ``axis`` must call it."""
        mine = self.told()
        self.compare(agreed(axis.all_reduce_(torch.tensor(mine, dtype=torch.uint8), "order", "max"), mine, axis), axis)


def _hash_of(x: Tensor) -> Tensor:
    dense = x if x.layout is torch.strided else x.to_dense()
    return digest(dense.resolve_conj().resolve_neg())


def _written_apart(writes: Sequence[Sequence[Write]], axis: Axis) -> str:
    counts = [Counter(own) for own in writes]
    other = next(i for i, own in enumerate(counts) if own != counts[0])
    first = min((counts[0] - counts[other]) + (counts[other] - counts[0]))
    return (
        f"{first.line}: ranks {axis.ranks[0]} and {axis.ranks[other]} do not write the same to {first.name}: "
        "data_parallel='fsdp' stores weights in parts over these ranks, and would keep parts of what each has written. "
        "What is written to weights must be alike on all replicas, whatever their batches hold: take the mean over "
        "replicas, as by `self.all_gather(x).mean(0)`, before it is written, or keep it in a buffer."
    )


def _differ(orders: Sequence[Sequence[str]], axis: Axis) -> str:
    first, rank = 0, 1
    for place, names in enumerate(zip_longest(*orders)):
        others = [i for i, name in enumerate(names) if name != names[0]]
        if others:
            first, rank = place, others[0]
            break
    named = [repr(order[first]) if first < len(order) else "no more" for order in (orders[0], orders[rank])]
    return (
        f"Since the last step of the optimizer rank {axis.ranks[0]} came to {named[0]} where rank {axis.ranks[rank]} "
        f"came to {named[1]}, the weight or the first of its block: data_parallel='fsdp' stores weights in parts over "
        "these ranks, and parts of different weights were joined. All replicas must call the same modules in the same "
        "order, whatever their batches hold: branch on what is alike on all of them, or write data_parallel='ddp'."
    )
