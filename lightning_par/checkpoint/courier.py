"""Tensors go to the first rank when it asks for them, one at a time, while the others wait to be asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.checkpoint.buffers import Scratch
from lightning_par.checkpoint.owners import Place
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.waits import wait_for

_ASK, _ANSWER = 7001, 7002  # tags
_DONE = -1


class Courier:
    """Brings to the first rank of the world what others hold.

    Args:
        world: all ranks.
        waiting: the global ranks that `serve`, beside the first.

    Example::

        courier = Courier(groups.world, groups.replica.ranks)
        if groups.world.rank == 0:
            weight = courier.fetch(3, place, None)
            courier.dismiss()
        else:
            courier.serve(lambda index: (places[index], parts[index]))
    """

    def __init__(self, world: Axis, waiting: tuple[int, ...]) -> None:
        self.world = world
        self.waiting = tuple(rank for rank in waiting if rank != 0)
        nccl = world.group is not None and not world.dry and "gloo" not in str(dist.get_backend(world.group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._arrived = Scratch(device=self.device)

    def fetch(self, number: int, place: Place, own: Tensor | None, out: Tensor) -> None:
        """Write tensor ``number`` into ``out``; on the first rank.

        Args:
            number: what the others know it by.
            place: where it lies.
            own: the part that this rank holds.
            out: of its shape and dtype, contiguous, on the CPU.
        """
        whole = place.folded(out)
        for rank in place.ranks:
            if rank != self.world.rank:
                self._say(number, rank)
        for index, rank in enumerate(place.ranks):
            if rank == self.world.rank:
                assert own is not None
                part = place.folded(own.detach().contiguous())
                place.put(whole, index, (slice(None), slice(0, part.shape[1])), part)
            else:
                self._receive(place, index, whole)

    def _receive(self, place: Place, index: int, whole: Tensor) -> None:
        rank = place.ranks[index]
        part = place.part_shape(index)
        count, after = (part[place.dim] if part else 1), whole.shape[2]
        for piece in place.pieces(index):
            target = place.target(whole, index, piece)
            if target is None or self.device.type != "cpu":  # it has gaps in the whole, or comes to a GPU
                rows, columns = (len(range(*s.indices(n))) for s, n in zip(piece, (whole.shape[0], count)))
                arrived = self._arrived.empty((rows, columns, after), whole.dtype)
                wait_for(self.world.start_recv_(arrived, rank, "state", tag=_ANSWER))
                place.put(whole, index, piece, arrived)
            else:
                wait_for(self.world.start_recv_(target, rank, "state", tag=_ANSWER))

    def serve(self, held: Callable[[int], tuple[Place, Tensor]]) -> None:
        """Send what is asked for until the first rank needs nothing more; on the others."""
        while (number := self._hear()) != _DONE:
            place, part = held(number)
            self._send(place, part)

    def _send(self, place: Place, part: Tensor) -> None:
        folded = place.folded(part.detach().contiguous())
        for rows, columns in place.pieces(place.ranks.index(self.world.ranks[self.world.rank])):
            piece = folded[rows, columns].to(self.device).contiguous()
            wait_for(self.world.start_send(piece, 0, "state", tag=_ANSWER))

    def dismiss(self) -> None:
        """Let the others go; on the first rank."""
        for rank in self.waiting:
            self._say(_DONE, rank)

    def _say(self, number: int, rank: int) -> None:
        wait_for(self.world.start_send(torch.tensor([number], device=self.device), rank, "state", tag=_ASK))

    def _hear(self) -> int:
        number = torch.empty(1, dtype=torch.int64, device=self.device)
        wait_for(self.world.start_recv_(number, 0, "state", tag=_ASK))
        return int(number.item())
