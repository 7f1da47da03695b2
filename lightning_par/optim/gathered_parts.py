"""Parts that stand whole for the rest of an optimizer's step.

What may hand out a view of a tensor, or its address, must be given all of it, and what is then written into it, or into
a view of it, must be in the parts when the step has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_par.optim import lost_writes
from lightning_par.private.storage import lies_as, memory_of
from lightning_par.private.tensors import write_count
from lightning_par.sharded.tensor import ShardedTensor


@dataclass
class _Whole:
    view: ShardedTensor
    part: Tensor  # shares the memory of the view's part, which may go to the user's next tensor meanwhile
    whole: Tensor
    version: int
    exposed: bool = False  # to what may write without torch's knowledge
    views: list[tuple[str, weakref.ref[Tensor]]] = field(default_factory=list)  # handed out by the function named


class Wholes:
    """The tensors that stand whole, by the memory of their parts.

    Example::

        wholes = Wholes()
        wholes.make(parameter).view(-1).mul_(2)
        wholes.cut()
    """

    def __init__(self) -> None:
        self._made: dict[int, list[_Whole]] = {}
        self._by_whole: dict[int, _Whole] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, x: ShardedTensor) -> Tensor | None:
        """The whole that stands for ``x``, if one does."""
        for made in self._made.get(memory_of(x.local), ()):
            if lies_as(made.part, x.local):  # in a dry run, too
                return made.whole
            if _overlap(made.part, x.local):
                raise RuntimeError(
                    f"A view of a sharded tensor, of shape {tuple(x.shape)}, is used after that tensor, of shape "
                    f"{tuple(made.whole.shape)}, was gathered. Make it anew from the tensor where it is used."
                )
        return None

    def make(self, x: ShardedTensor) -> Tensor:
        """Gather ``x``, which stands whole from now on. All ranks along its axis must call it."""
        whole = self.of(x)
        if whole is None:
            with torch.no_grad():
                whole = x.full_tensor("optimizer")
                whole = whole.clone() if lies_as(whole, x.local) else whole.detach()
                part = x.local.detach()
            made = _Whole(x, part, whole.requires_grad_(x.requires_grad), write_count(whole))
            self._made.setdefault(memory_of(part), []).append(made)
            self._by_whole[memory_of(whole)] = made
        return whole

    def expose(self, wholes: Iterable[Tensor]) -> None:
        """What is given ``wholes`` may write into them unseen."""
        for whole in wholes:
            self._by_whole[memory_of(whole)].exposed = True

    def note_views(self, name: str, result: Iterable[Tensor]) -> None:
        """Keep an eye on what the function ``name`` has returned: a view of a whole may outlive it."""
        for x in result:
            made = self._by_whole.get(memory_of(x))
            if made is not None and x is not made.whole:
                made.views.append((name, weakref.ref(x)))

    @torch.no_grad()
    def cut(self) -> None:
        """Let the parts have what the wholes have; what was a view of one becomes a copy. No communication."""
        self._by_whole.clear()
        found = [made for those in self._made.values() for made in those]
        self._made.clear()
        for made in found:
            if made.whole.shape != made.view.shape:
                raise RuntimeError(
                    f"A sharded tensor of shape {tuple(made.view.shape)} was given another one in place, "
                    f"{tuple(made.whole.shape)}, which it can't have."
                )
            if made.exposed or write_count(made.whole) != made.version:
                made.part.copy_(made.view.part_of(made.whole.detach()))
            for name, reference in made.views:
                x = reference()
                if x is not None:
                    lost_writes.note(name, made.part, x)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in the same storage may have entries in common."""
    if not a.numel() or not b.numel():
        return False
    (start, end), (other, its_end) = (
        (x.storage_offset(), x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))) for x in (a, b)
    )
    return start <= its_end and other <= end
