"""The memory of tensors."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def memory_of(x: Tensor) -> int:
    """A number for the memory that ``x`` and its views share; on ``meta``, too, where all addresses are 0."""
    return x.untyped_storage()._cdata


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of the strided ``x``, unseen by modes: the same object as long as anything lies in it.

    So attributes of it live as long as the memory does; torch promises it nowhere. Its public name is the method.
    """
    if x.layout != torch.strided or hasattr(x, "no_storage"):  # deferred
        return None
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()


def is_shared(x: Tensor) -> bool:
    """Whether another tensor, wherever it is, has memory of the strided ``x``, or may have it, as an array of numpy."""

    def uses(x: Tensor) -> int:  # torch counts them for its own graphs; the storage that asks is one
        count: int = torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # type: ignore[attr-defined]
        return count

    with torch._C.DisableTorchFunction():
        return uses(x) > uses(torch.empty(1)) or not x.untyped_storage().resizable()


class _Data(property):
    """``torch.Tensor.data``, whose name is asked for by what watches torch functions."""

    __name__ = "data"


def replace_data_setter(takes: Callable[[Tensor, Any, Callable[[Tensor, Tensor], None]], bool]) -> None:
    """Ask ``takes(x, value, set)`` first where a tensor's ``data`` is set: whether it has done so.

    Torch asks no ``__torch_function__`` of the value, and takes one that has no memory for a plain one.
    """
    plain: Any = torch._C.TensorBase.data

    def set_data(x: Tensor, value: Any) -> None:
        if not takes(x, value, plain.__set__):
            plain.__set__(x, value)

    torch.Tensor.data = _Data(plain.__get__, set_data)  # type: ignore[assignment,misc]


def is_held(x: Tensor) -> bool:
    """Whether C++ code or a weak reference refers to ``x``, so that it can't be swapped; torch checks the same."""
    count: int = x._use_count()  # type: ignore[attr-defined]
    return count > 1 or bool(weakref.getweakrefs(x))


def trim_memory() -> None:
    """Hand what the process has given up back to the system: glibc keeps freed blocks of up to 32 MB, and a model that
    was built tensor by tensor would occupy twice its size. Elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
