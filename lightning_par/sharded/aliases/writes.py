"""How often functions wrote into a tensor's memory, and parts cut of it that hold what was written."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.storage import storage_of, tensor_in
from lightning_par.sharded.aliases.frames import form_of, innermost

_WRITES = "_lightning_par_writes"
_CUTS = "_lightning_par_cuts"


def count_write(args: Any) -> None:
    """Called before a function writes in place into the first of ``args``."""
    x = innermost(args[0]) if args else None
    storage = storage_of(x) if isinstance(x, Tensor) else None
    if storage is not None:
        setattr(storage, _WRITES, getattr(storage, _WRITES, 0) + 1)


def writes_into(x: Tensor) -> int:
    """How often functions wrote into the memory of the plain ``x``, through ``.data`` too, which no version shows."""
    return getattr(storage_of(x), _WRITES, 0)


def keep_cut(whole: Tensor, part: Tensor, cut: Callable[[Tensor], Tensor]) -> None:
    """``part`` was cut of the plain ``whole`` and may be saved for backward, where one device saves ``whole`` itself.

    Args:
        whole: what `renew_cuts` is told of when something was written into it.
        part: plain.
        cut: makes it of what ``whole`` holds. It leads to no tensor of that memory, which keeps it, and which Python's
            garbage collector does not see through.
    """
    storage, held = storage_of(whole), storage_of(part)
    if storage is None or held is None or held is storage or part.device.type == "meta" or isinstance(part, FakeTensor):
        return
    cuts = [one for one in getattr(storage, _CUTS, ()) if one[0]() is not None]
    setattr(storage, _CUTS, [*cuts, (weakref.ref(held), form_of(whole), form_of(part), cut)])


def renew_cuts(x: Tensor) -> None:
    """Something was written into ``x``: parts that were cut of its memory hold what is in it now.

    Of a write that versions show a backward tells on one device; one through ``.data`` is seen by it.
    """
    storage = storage_of(innermost(x))
    for held, whole, part, cut in getattr(storage, _CUTS, ()):
        memory = held()
        if memory is not None and storage is not None:
            tensor_in(memory, *part).copy_(cut(tensor_in(storage, *whole)))
