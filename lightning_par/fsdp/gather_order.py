"""Whether the ranks that store parts of the same weights come to them in one order.

Messages along an axis meet in the order in which each rank sends them. Where replicas take different branches, parts of
two weights of one size would be joined without a word, so what each has come to is compared once a step, before the
optimizer writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from lightning_par.mesh.host_values import agreed

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis

MOST = 4096
"""Messages that are kept to name the first that differs."""


class GatherOrder:
    """The messages of weights and of their gradients along one axis since they were compared.

    Example::

        order = GatherOrder()
        order.note("layers.0.weight")
        found = axis.all_reduce_(torch.tensor(order.told(), dtype=torch.uint8), "order", "max").tolist()
        order.compare(found, axis)
    """

    def __init__(self) -> None:
        self._hash = 0
        self._met: deque[str] = deque(maxlen=MOST)

    def note(self, name: str) -> None:
        """A message of the weight ``name``, or of a block that begins with it, is about to leave."""
        self._hash = crc32(name.encode(), self._hash)
        self._met.append(name)

    @property
    def is_empty(self) -> bool:
        return not self._met

    def told(self) -> list[int]:
        """Bytes of which the most over all ranks show whether all have told the same."""
        own = [*self._hash.to_bytes(4, "little")]
        return [*own, *(255 - byte for byte in own)]

    def compare(self, most: Sequence[float], axis: Axis) -> None:
        """Begin anew, after all ranks of ``axis`` have `told`; all of them come here.

        Args:
            most: of each byte, the most over the ranks.
            axis: theirs.

        Raises:
            RuntimeError: they have come to different weights; on all ranks.
        """
        met, self._met, self._hash = self._met, deque(maxlen=MOST), 0
        half = len(most) // 2
        if any(a + b != 255 for a, b in zip(most[:half], most[half:])):
            raise RuntimeError(_differ(axis.all_gather_object([*met], "order"), axis))

    def ask(self, axis: Axis) -> None:
        """`told` and `compare` in a message of their own. All ranks of ``axis`` must call it."""
        mine = self.told()
        self.compare(agreed(axis.all_reduce_(torch.tensor(mine, dtype=torch.uint8), "order", "max"), mine, axis), axis)


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
