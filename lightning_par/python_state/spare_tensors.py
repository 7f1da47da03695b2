"""Copies of tensors for a run to work on, so that the originals stay as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.python_state.tensor_writes import is_written, version_of

_WASTE = 1 << 20  # bytes of memory that may be copied beside the tensors in it


@dataclass
class _Copy:
    """Tensors that share memory, and the copies that do."""

    originals: list[Tensor]
    versions: list[int]
    spares: list[Tensor]
    spare_versions: list[int]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, and none has changed since."""
        return (
            len(tensors) == len(self.originals)
            and all(a is b for a, b in zip(tensors, self.originals))
            # inference tensors, at -1, don't tell
            and all(version_of(x) == v >= 0 for x, v in zip(tensors, self.versions))
            and not any(map(is_written, self.spares, self.spare_versions))
        )


class Spares:
    """Gives copies, the last run's where neither they nor the originals have changed since.

    Whether they have their versions tell, which count what torch's functions write, and nothing that is written through
    `.data` or an array of numpy: who lets other code run calls `forget`.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._last: dict[int, _Copy] = {}  # of the run before

    def of(self, groups: Iterable[Sequence[Tensor]], uncounted: Collection[int] = ()) -> dict[int, Tensor]:
        """The spares of tensors, by their ids; those of a group share memory as the tensors do.

        What no group holds any more is let go.

        Args:
            groups: tensors, those together that share memory.
            uncounted: ids of tensors that may have changed though their versions have not.
        """
        self._last, self._copies = self._copies, {}
        found: dict[int, Tensor] = {}
        for group in groups:
            copy = self._last.get(id(group[0]))
            if copy is None or id(group[0]) in uncounted or not copy.holds(group):
                copy = _copied(list(group))
            self._copies[id(group[0])] = copy
            found.update((id(x), spare) for x, spare in zip(copy.originals, copy.spares))
        self._last = {}
        return found

    def forget(self) -> None:
        """The originals may hold something else now, whatever their versions say."""
        self._copies = {}


def grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors, those together that share memory."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for x in tensors:
        strided = x.layout == torch.strided and x.device.type != "meta" and x.untyped_storage().data_ptr()
        groups[(x.device, x.untyped_storage().data_ptr()) if strided else id(x)].append(x)
    return list(groups.values())


def may_be_copied(group: Sequence[Tensor]) -> bool:
    """Whether tensors that share memory are most of what is in it."""
    if len(group) == 1:
        return True
    return group[0].untyped_storage().nbytes() <= _WASTE + 2 * sum(x.nbytes for x in group)


def _copied(group: list[Tensor]) -> _Copy:
    if len(group) == 1:
        spares = [group[0].detach().clone()]
    else:
        x = group[0].detach()
        whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).clone()
        spares = [_view(whole, x) for x in group]
    return _Copy(group, list(map(version_of, group)), spares, list(map(version_of, spares)))


def _view(whole: Tensor, like: Tensor) -> Tensor:
    """What ``like`` is of its memory, of a copy of that."""
    if whole.dtype != like.dtype:
        whole = whole.view(torch.uint8).view(like.dtype)
    return whole.as_strided(like.size(), like.stride(), like.storage_offset())
