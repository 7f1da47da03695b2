"""How often a tensor was written, and how it is written or given another value."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_par.private.tensors import view_base, write_count


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors don't count."""
    return -1 if tensor.is_inference() else write_count(tensor)


def note_write(tensor: Tensor) -> None:
    """``tensor`` is changed by something that its version does not count, such as a write into its ``.data``."""
    tensor._written_uncounted = True  # type: ignore[attr-defined]


def forget_write(tensor: Tensor) -> None:
    """Take back `note_write`."""
    vars(tensor).pop("_written_uncounted", None)


def is_written(tensor: Tensor, version: int, copy: Tensor | None = None) -> bool:
    """Whether ``tensor`` was changed since it had ``version``; with a ``copy`` of then, by ways, too, that no version
    counts: `.data`, arrays of numpy."""
    if version_of(tensor) != version or hasattr(tensor, "_written_uncounted"):
        return True
    return copy is not None and not holds_the_same(tensor, copy)


def holds_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, with NaN where the other one has it."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other) if one.layout == torch.strided else True
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def set_to(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` another value, such that a graph that holds it goes on with the one that it had."""
    if view_base(tensor) is not None:
        tensor.copy_(value)
        return
    tensor.data = torch.empty_like(tensor).copy_(value)
    note_write(tensor)


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Write ``value`` into ``tensor``."""
    with torch.no_grad():
        if tensor.shape == value.shape:
            tensor.copy_(value)
        else:  # its `.data` was set
            tensor.data = value.to(tensor)
