"""What brings the blocks of all ranks' keys and values by, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Meet = Callable[[int, Tensor, Tensor], None]
MeetBack = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class BlockCarrier(Protocol):
    """Brings every rank's keys and values to the queries, and the gradients back."""

    def forward(self, k: Tensor, v: Tensor, meet: Meet) -> Sequence[Tensor]:
        """Call ``meet(source, k, v)`` once for each rank's keys and values; ``k`` and ``v`` are this rank's.

        Returns:
            What is to be kept of those of others for `backward`, if anything.
        """

    def backward(
        self, k: Tensor, v: Tensor, meet: MeetBack, needed: tuple[bool, bool], came: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same, given what was kept; ``meet`` returns the gradients of the block that it is given.

        Returns:
            The gradients of this rank's ``k`` and ``v``, where they are ``needed``, summed over the ranks' queries.
        """


class Whole:
    """The carrier of keys and values that every rank holds: nothing moves. Their gradients are this rank's share."""

    def forward(self, k: Tensor, v: Tensor, meet: Meet) -> Sequence[Tensor]:
        meet(0, k, v)
        return ()

    def backward(
        self, k: Tensor, v: Tensor, meet: MeetBack, needed: tuple[bool, bool], came: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        grads = meet(0, k, v)
        return grads[0].to(k.dtype) if needed[0] else None, grads[1].to(v.dtype) if needed[1] else None
