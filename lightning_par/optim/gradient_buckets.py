"""Gradients on their way to the ranks that hold the same weights, several in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.host_values import agreed, on_device
from lightning_par.mesh.waits import wait_for

Gradient = Callable[[Tensor], Tensor | None]
"""The gradient of a leaf, if it has one."""


@dataclass
class Bucket:
    """Leaves whose gradients travel as one message, and how far it is on its way."""

    axis: Axis
    copies: int  # of the ranks, those that have a gradient of their own
    leaves: list[Tensor] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    told: Tensor | None = None  # behind the gradients: for each leaf of the average whether any rank has one
    work: dist.Work | None = None

    @property
    def nbytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.leaves)

    def launch(self, gradient: Gradient, flags: Sequence[bool] = ()) -> None:
        """Let it leave, and behind the gradients what ``flags`` say of this rank."""
        grads = [(leaf, gradient(leaf)) for leaf in self.leaves]
        pieces = [_zeros(leaf) if grad is None else grad.reshape(-1) for leaf, grad in grads]
        if flags:
            pieces.append(_numbers(flags, pieces[0]))
        self.flat = torch.cat(pieces)
        if self.copies > 1:
            self.flat.div_(self.copies)
        self.work = self.axis.start_all_reduce_(self.flat, "gradients")
        if flags:
            self.told = self.flat[-len(flags) :]

    def land(self) -> list[tuple[Tensor, Tensor]]:
        """Wait; returns every leaf with its averaged gradient."""
        assert self.flat is not None
        if self.work is not None:
            wait_for(self.work)
        sizes = [leaf.numel() for leaf in self.leaves]
        grads = self.flat if self.told is None else self.flat[: -len(self.told)]
        landed = [(leaf, part.view(leaf.shape)) for leaf, part in zip(self.leaves, grads.split(sizes))]
        self.reset()
        return landed

    def reset(self) -> None:
        self.arrived.clear()
        self.flat = self.told = self.work = None


def _numbers(flags: Sequence[bool], like: Tensor) -> Tensor:
    """Ones and zeros that are summed with gradients; no sum of theirs is zero but that of zeros."""
    return like.new_ones(len(flags)) if all(flags) else on_device(flags, like.dtype, like.device)


def _zeros(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.numel(), dtype=leaf.dtype, device=leaf.device)


class Buckets:
    """All messages of one average, which leave in one order on all ranks, whatever arrives first.

    Args:
        axis: the ranks that tell each other which gradients there are.
        buckets: in the order in which they leave.
    """

    def __init__(self, axis: Axis, buckets: Sequence[Bucket] = ()) -> None:
        self._axis, self._buckets = axis, buckets
        self._of = {id(leaf): bucket for bucket in buckets for leaf in bucket.leaves}
        self._leaves = [leaf for bucket in buckets for leaf in bucket.leaves]
        # The last one leaves when all others have: it takes the flags along, if it goes to all who are to know.
        self._takes_flags = bool(buckets) and all(bucket.axis is axis for bucket in buckets)
        self._launched = 0

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __contains__(self, leaf: Tensor) -> bool:
        return id(leaf) in self._of

    def reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._launched = 0

    def has_left(self, leaf: Tensor) -> bool:
        return self._of[id(leaf)].flat is not None

    def arrive(self, leaf: Tensor, gradient: Gradient) -> None:
        """The gradient of ``leaf`` is final: what is complete with it leaves."""
        number = id(leaf)
        bucket = self._of[number]
        bucket.arrived.add(number)
        if bucket.complete:
            self._launch(gradient, lambda x: gradient(x) is not None, everything=False)

    @torch.no_grad()
    def _launch(self, gradient: Gradient, mine: Callable[[Tensor], bool], everything: bool) -> None:
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            # in order on all ranks, so a full one waits for those before it
            if not (everything or bucket.complete):
                return
            self._launched += 1
            takes_flags = self._takes_flags and self._launched == len(self._buckets)
            bucket.launch(gradient, [mine(leaf) for leaf in self._leaves] if takes_flags else ())

    def send_rest(
        self, gradient: Gradient, mine: Callable[[Tensor], bool]
    ) -> Callable[[], list[tuple[Tensor, Tensor]]]:
        """Let everything leave. All ranks along the axis must call it.

        Args:
            gradient: what has not arrived leaves as this.
            mine: whether a leaf has a gradient of this rank.

        Returns:
            What waits: each leaf that has a gradient on any rank, with the average.
        """
        self._launch(gradient, mine, everything=True)
        here = [mine(leaf) for leaf in self._leaves]
        told, work = self._buckets[-1].told if self._takes_flags else None, None
        if self._leaves and not self._takes_flags:
            told = on_device(here, torch.uint8, self._leaves[0].device)
            work = self._axis.start_all_reduce_(told, "gradient flags", "max")

        def land() -> list[tuple[Tensor, Tensor]]:
            landed = [pair for bucket in self._buckets for pair in bucket.land()]
            if work is not None:
                wait_for(work)
            # Reading the flags waits for the device, so they are read only where something is missing here.
            got = here if all(here) or told is None else [bool(x) for x in agreed(told, here, self._axis)]
            return [pair for pair, there in zip(landed, got) if there]

        return land
