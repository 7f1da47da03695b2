"""``x.data`` of a weight that was gathered for a call may be written to, unseen: whoever gathered it is told.

``x.data = value`` asks no ``__torch_function__`` of the value, and takes one that has no memory for a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_par.private.tensors import set_data as plain_set_data
from lightning_par.sharded import aliases
from lightning_par.sharded.aliases.frames import axes_of
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.rules.lookup import announce_gather
from lightning_par.sharded.tensor import ShardedTensor, full


def patch() -> Replacement:
    """Of `torch.Tensor.data`."""
    return Replacement(Tensor, "data", _asking)


class _Data(property):
    """``torch.Tensor.data``, whose name is asked for by what watches torch functions."""

    __name__ = "data"


def _asking(plain: Any, use: Use) -> Any:
    def set_data(x: Tensor, value: Any) -> None:
        if not use.on or not _take_data(x, value, plain.__set__):
            plain.__set__(x, value)

        if use.on:
            _tell(x)

    def get_data(x: Tensor) -> Any:
        if use.on:
            _tell(x)
        return plain.__get__(x)

    return _Data(get_data, set_data)


def _tell(x: Tensor) -> None:
    """Of a whole weight that stands for one stored in parts: what is written to ``x.data`` has no version."""
    told = getattr(x, "_data_taken", None)
    if told is not None:
        told()


def _take_data(x: Tensor, value: Any, set_data: Callable[[Tensor, Tensor], None]) -> bool:
    """``x.data = value`` of a plain ``x`` and a sharded value, whose memory it has from now on, or one that is spread
    over a pipeline."""
    lend = getattr(value, "lend_data", None)
    if lend is not None and not hasattr(x, "lend_data"):
        return bool(lend(x))
    if not isinstance(value, ShardedTensor) or isinstance(x, ShardedTensor):
        return False
    announce_gather(plain_set_data, [value])
    whole = full(value).detach()
    set_data(x, whole)
    if value.axis.size > 1 and whole is not value._innermost:  # else it is the value's own memory
        aliases.note("data", value.twin(), whole, aliases.gathered, _put, axes_of(value), apart=True, loose=True)
    return True


def _put(x: ShardedTensor, whole: Tensor) -> None:
    x._local.copy_(x.part_of(whole))
