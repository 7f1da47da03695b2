"""Bytes of memory that tensors hold, counted as they are made and freed: exact, unlike what a process occupies."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.storage import memory_of


class LiveBytes(TorchDispatchMode):
    """What was made since it was entered, in this thread and in backward of it, as long as it lives.

    Args:
        least: bytes of the smallest change that ``steps`` has.
        kind: of devices whose memory counts, as "cuda"; by default all.
        block: bytes to a multiple of which an allocator rounds up what it is asked for.

    Attributes:
        now: bytes that live.
        peak: the most that ever did.
        steps: ``now`` after each change of at least ``least`` bytes.

    Example::

        with LiveBytes() as live:
            x = torch.zeros(1000)
            del x
        assert (live.now, live.peak) == (0, 4000)
    """

    def __init__(self, least: int = 0, kind: str | None = None, block: int = 1) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.least, self.kind, self.block = least, kind, block
        self.steps: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {*map(memory_of, _here((args, kwargs)))}
        result = func(*args, **(kwargs or {}))
        for x in _here(result):
            if self.kind in (None, x.device.type) and memory_of(x) not in before:
                self._made(memory_of(x), x.untyped_storage())
        return result

    def _made(self, number: int, memory: torch.UntypedStorage) -> None:
        if number not in self._known and memory.nbytes():
            size = -(-memory.nbytes() // self.block) * self.block
            self._known.add(number)
            self._add(size)
            weakref.finalize(memory, self._freed, number, size)

    def _freed(self, number: int, size: int) -> None:
        self._known.discard(number)
        self._add(-size)

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        if abs(size) >= self.least:
            self.steps.append(self.now)


def _here(values: Any) -> Iterator[Tensor]:
    """The tensors that have memory on this rank; one that is elsewhere would bring its values if it were asked."""
    return (x for x in tree_leaves(values) if isinstance(x, Tensor) and not is_elsewhere(x))
