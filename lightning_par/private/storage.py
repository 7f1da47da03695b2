"""The memory of tensors."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import active_fakes
from lightning_par.private.transforms import unwrapped


def memory_of(x: Tensor) -> int:
    """A number for the memory that ``x`` and its views share; on ``meta``, too, where all addresses are 0.

    Of a transform's own tensor it is that of what it stands for.
    """
    return unwrapped(x).untyped_storage()._cdata


def lies_as(x: Tensor, other: Tensor) -> bool:
    """`Tensor.is_set_to`, also of tensors without values, of which that is never true."""
    places = [(y.untyped_storage()._cdata, y.storage_offset(), y.shape, y.stride()) for y in (x, other)]
    return places[0] == places[1]


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of the strided ``x``, unseen by modes: the same object as long as anything lies in it.

    So attributes of it live as long as the memory does; torch promises it nowhere. Its public name is the method.
    """
    if x.layout != torch.strided or hasattr(x, "no_storage"):  # deferred
        return None
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()


def tensor_in(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int],
    device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """A tensor in memory that is there, of no graph and with a version of its own, unseen by modes.

    Tensors without values lie in memory on ``meta``: they say what ``device`` is theirs.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        x = torch.empty(0, dtype=dtype, device=device or storage.device)
        fakes = active_fakes()
        if fakes is not None and storage.device != x.device:
            x = fakes.from_tensor(x)
        return x.set_(storage, offset, tuple(shape), tuple(stride))  # type: ignore[arg-type, no-any-return]


def is_mapped(x: Tensor) -> bool:
    """Whether the memory of the strided ``x`` on the CPU is none that torch allocated, as that of a mapped file."""
    storage = storage_of(x) if x.device.type == "cpu" else None
    return storage is not None and not storage.resizable()


def tensors_in_memory(x: Tensor) -> int:
    """How many tensors there are, wherever they are, in the memory of the strided ``x``; itself is one."""

    def uses(x: Tensor) -> int:  # torch counts them for its own graphs; the storage that asks is one
        count: int = torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # type: ignore[attr-defined]
        return count

    with torch._C.DisableTorchFunction():
        return uses(x) - uses(torch.empty(1)) + 1


def is_shared(x: Tensor) -> bool:
    """Whether another tensor, wherever it is, has memory of the strided ``x``, or may have it, as an array of numpy."""
    if tensors_in_memory(x) > 1:
        return True
    with torch._C.DisableTorchFunction():
        return not x.untyped_storage().resizable()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_USUAL = 32 << 20  # what glibc's own grows to on the way


def give_back_freed(least: int | None) -> None:
    """Have glibc hand blocks of ``least`` bytes and more back to the system as they are freed; None: as by default.

    By default it comes to keep blocks of up to 32 MB for use again. In the holes of gathered weights lie small tensors
    soon, and a process takes half as much memory again as it uses. Does nothing elsewhere, nor where the user has set
    the threshold by the environment.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    threshold = _USUAL if least is None else least
    libc.mallopt(_MMAP_THRESHOLD, threshold)  # type: ignore[union-attr]
    libc.mallopt(_TRIM_THRESHOLD, 2 * threshold)  # type: ignore[union-attr]  # as glibc sets it along with the other


def trim_memory() -> None:
    """Hand what the process has given up back to the system: glibc keeps freed blocks of up to 32 MB, and a model that
    was built tensor by tensor would occupy twice its size. Elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
