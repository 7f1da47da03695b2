"""What is written into checkpoint files, and read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LateStorage(torch.UntypedStorage):
    """Bytes of a tensor that are fetched when they are written to a file, one tensor after another.

    `torch.save` writes what ``cpu()`` of a storage returns that is not on the CPU, and gives it up before the next.

    Args:
        nbytes: how many.
        fetch: brings them.
        address: where they will be once the tensor is asked for its own address, which brings them there.
    """

    def __new__(cls, nbytes: int, fetch: Callable[[], Any], address: Callable[[], int]) -> LateStorage:
        return super().__new__(cls, nbytes, device="meta")  # type: ignore[call-arg]

    def __init__(self, nbytes: int, fetch: Callable[[], Any], address: Callable[[], int]) -> None:
        self.fetch, self._address = fetch, address

    def cpu(self) -> Any:
        return self.fetch()

    def data_ptr(self) -> int:
        return self._address()


def reduced_late(shape: torch.Size, dtype: torch.dtype, storage: LateStorage) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns of a contiguous tensor on the CPU that has ``storage``."""
    rebuild, (real, _, _, _, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    typed = isinstance(real, torch.TypedStorage)
    late: Any = torch.TypedStorage(wrap_storage=storage, dtype=dtype if typed else torch.uint8, _internal=True)
    late._fake_device = "cpu"
    strides = torch.empty(shape, device="meta").stride()
    return rebuild, (late, 0, tuple(shape), strides, *rest)


STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
"""The class that describes where torch's reader of distributed checkpoints finds a tensor, by module and name."""

METADATA_NAMES = (
    STORAGE_INFO,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
)
"""What the pickle of a distributed checkpoint's metadata names, of what has no public name."""


def stored_at(file: str, offset: int, length: int) -> Any:
    """Where torch's reader of distributed checkpoints finds a tensor; its description has no public name."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def offset_in_file(x: torch.Tensor) -> int:
    """Where the bytes begin of the storage of ``x``, which `torch.load` read with ``map_location="meta"``; -1 for none.
    Torch's notes on serialization name the attribute."""
    offset = x.untyped_storage()._checkpoint_offset  # type: ignore[attr-defined]
    return -1 if offset is None else int(offset)


def parameter_of_pickle() -> Callable[..., Any]:
    """What a pickled `nn.Parameter` calls: torch has no other way to pickle one whose values come only then."""
    return torch._utils._rebuild_parameter
