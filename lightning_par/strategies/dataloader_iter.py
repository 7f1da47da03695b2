"""What a step with ``dataloader_iter`` fetches its batches of itself: all ranks of a replica get the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import broadcast_batch
from lightning_par.private.loaders import note_fetched
from lightning_par.python_state import generators


class Fetching(Iterator[tuple[Any, int, int]]):
    """What Lightning hands to the step, with the batches of a replica's first rank.

    Lightning moves no such batch to the device, and so shows it to no strategy before the step has it. All ranks of the
    replica must fetch as many.

    Args:
        inner: Lightning's own, over this rank's loader.
        replica: the ranks that share batches.
        device: where the process group's tensors live.
        marked: makes of the shared batch what the step gets.
    """

    def __init__(self, inner: Iterator[Any], replica: Axis, device: torch.device, marked: Callable[[Any], Any]) -> None:
        self._inner, self._replica, self._device, self._marked = inner, replica, device, marked

    def __next__(self) -> tuple[Any, int, int]:
        batch, batch_idx, dataloader_idx = next(self._inner, (_END, 0, 0))
        if self._replica.size > 1:
            state = generators.packed_state() if self._replica.tells() else b""
            batch, state = broadcast_batch((batch, state), self._replica, self._device)
            if self._replica.rank > 0:
                generators.unpack_state(state)
        if isinstance(batch, str) and batch == _END:
            raise StopIteration
        note_fetched(self._inner, batch)
        return self._marked(batch), batch_idx, dataloader_idx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_END = "lightning_par: the loader has no batch left"  # in the place of one; it travels as it is
