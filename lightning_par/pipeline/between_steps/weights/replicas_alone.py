"""What the ranks of a pipeline would tell of tensors that user code made the memory of weights, where one of them alone
is there, as in a dry run: user code is the same on all, and holds the same tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_par.private.storage import is_mapped, tensors_in_memory


@dataclass(frozen=True)
class Lying:
    """One that was given as the memory of a weight or gradient.

    Attributes:
        holders: the ranks that hold the weight.
        memory: of what was given.
        given: what is kept of it here; None where the weight itself has its memory.
        here: the weight or gradient, where this rank has it and it lies in that memory.
        stays: whether it does so on the ranks that hold it.
        is_cut: whether these have parts of the weight, each in memory of its own, and keep what was given, too.
    """

    holders: tuple[int, ...]
    memory: int
    given: Tensor | None
    here: Tensor | None
    stays: bool
    is_cut: bool = False


def looked_at(lying: Sequence[Lying], ranks: int) -> list[bool]:
    """Of each, whether something looks at its memory on any rank that does not hold the weight: the user's code, which
    does so on all, or another weight there, or what is kept for one.

    Args:
        lying: all that were given.
        ranks: along the pipeline.

    Example::

        alone = Lying((0,), memory_of(x), x, None, True)
        assert looked_at([alone], 2) == [False]
    """
    together: dict[int, list[int]] = defaultdict(list)
    for i, x in enumerate(lying):
        together[x.memory].append(i)
    found = [False] * len(lying)
    for same in together.values():
        by_user = _by_user([lying[i] for i in same])
        for i in same:
            away = [rank for rank in range(ranks) if rank not in lying[i].holders]
            others = [lying[j] for j in same if j != i]
            found[i] = bool(away) and (
                by_user or any(x.stays or x.is_cut or not {*away} <= {*x.holders} for x in others)
            )
    return found


def _by_user(same: Sequence[Lying]) -> bool:
    """Whether other tensors than these lie in the memory in which all of them are."""
    ours = [x for one in same for x in (one.given, one.here) if x is not None]
    return bool(ours) and (tensors_in_memory(ours[0]) > len(ours) or is_mapped(ours[0]))
