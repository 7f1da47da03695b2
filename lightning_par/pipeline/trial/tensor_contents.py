"""What small tensors hold by which the code within units may decide, and what of it code outside units has written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.tensors import write_count

FEW = 64  # entries of a tensor that code may decide by

Told = Mapping[str, tuple[list[Any], bool]]
"""By place, what a tensor holds, and whether it was written since the last step."""


class TensorContents:
    """Of the tensors that units hold beside weights; the ranks tell one another of them, as one alone has a buffer.

    Args:
        held: gives them, by place, with what stands for those of other ranks.

    Attributes:
        lent: what tensors hold of which another rank has told, by the id of what stands for them here.

    Example::

        contents = TensorContents(lambda: iter([("net.0.flag", module.net[0].flag)]))
        contents.rewritten()
        module.net[0].flag.fill_(1)
        assert contents.rewritten() == {"net.0.flag": "[1.0]"}
    """

    def __init__(self, held: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self.held = held
        self.lent: dict[int, Tensor] = {}
        self._known: dict[str, tuple[Tensor, int, str]] | None = None  # None where no unit reads any

    @property
    def tell(self) -> bool:
        """Whether there are small ones, on any rank."""
        return any(x.numel() <= FEW for _, x in self.held())

    def told(self) -> Told:
        """What the small ones hold that are here; whether they were written, by ways that versions don't count, too."""
        written = self.rewritten(by_version=False)
        return {place: (x.flatten().tolist(), place in written) for place, (x, _, _) in (self._known or {}).items()}

    def hear(self, told: Iterable[Told]) -> dict[str, Any]:
        """What each of the ranks has `told`; returns what was written on any of them."""
        found: dict[str, list[Any]] = {}
        changed: dict[str, Any] = {}
        for theirs in told:
            found.update((place, content) for place, (content, _) in theirs.items())
            changed.update((place, repr(content)) for place, (content, written) in theirs.items() if written)
        lacking = ((place, x) for place, x in self.held() if is_elsewhere(x) and place in found)
        self.lent = {
            id(x): torch.tensor(found[place], dtype=x.dtype, device=x.device).view(x.shape) for place, x in lacking
        }
        return changed

    def settle(self) -> None:
        """A step has run: what units have written is known."""
        if self._known is not None:
            self.rewritten(by_version=False)

    def rewritten(self, by_version: bool = True) -> dict[str, Any]:
        """What those hold now that held something else at the last look; where their versions have not changed, they
        are not looked at, if it goes ``by_version``."""
        was, now = self._known, dict[str, tuple[Tensor, int, str]]()
        for place, x in self.held():
            if not is_elsewhere(x) and x.device.type != "meta" and x.numel() <= FEW:
                before, version, content = (was or {}).get(place, (None, 0, ""))
                same = by_version and version == write_count(x) and before is x
                now[place] = (x, write_count(x), content if same else repr(x.flatten().tolist()))
        self._known = now
        if was is None:
            return {}
        return {place: x for place, (_, _, x) in now.items() if x != was.get(place, (0, 0, ""))[2]}
