"""``.metadata`` of a directory: which file has which box of which tensor.

It is a pickle of torch's own descriptions. Nothing in it is looked up or called: each of these descriptions is made
here, of values that were checked.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_par.checkpoint.pickles import Asked, described
from lightning_par.private.checkpoints import METADATA_NAMES, STORAGE_INFO, stored_at

_HOME = "torch.distributed.checkpoint.metadata"
_DTYPES = {str(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_KINDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
          "MetadataIndex", "StorageMeta")  # fmt: skip
_NAMES = {
    *((_HOME, kind) for kind in _KINDS),
    *METADATA_NAMES,
    ("torch", "Size"), *(("torch", x.partition(".")[2]) for x in _DTYPES),
    ("builtins", "getattr"),  # how Python 3.11.0 to 3.11.3 write the member of an enum
    *((module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
}  # fmt: skip


def parsed(content: bytes) -> Metadata:
    """What the bytes of ``.metadata`` say, as far as a reader of tensors needs it.

    Raises:
        EOFError: they end too early.
        pickle.UnpicklingError: they hold what has no place there, which the message names.
        ValueError: they are garbled.

    Example::

        metadata = parsed(Path("last.ckpt/.metadata").read_bytes())
        print(metadata.state_dict_metadata["state_dict.weight"].size)
    """
    try:
        return _metadata(described(content, _NAMES))
    except (EOFError, pickle.UnpicklingError):
        raise
    except (LookupError, TypeError) as error:
        raise ValueError(f"it is garbled ({type(error).__name__}: {error})") from error


def _metadata(value: Any) -> Metadata:
    fields = _fields(value, "Metadata")
    stored = {_a(str, name): _stored(x) for name, x in _a(dict, fields["state_dict_metadata"]).items()}
    places = {_index(key): _place(x) for key, x in _a(dict, fields.get("storage_data") or {}).items()}
    return Metadata(stored, storage_data=places)


def _stored(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _a(Asked, value).name == f"{_HOME}.BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    dtype = _a(Asked, _asked(fields["properties"], f"{_HOME}.TensorProperties", tuple)[0])
    size, chunks = _size(fields["size"]), [_chunk(x, _size(fields["size"])) for x in _a(list, fields["chunks"])]
    return TensorStorageMetadata(TensorProperties(dtype=_DTYPES[dtype.name]), size, chunks)


def _chunk(value: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata")
    offsets, sizes = _size(fields["offsets"]), _size(fields["sizes"])
    if not len(offsets) == len(sizes) == len(whole) or any(o + s > w for o, s, w in zip(offsets, sizes, whole)):
        raise ValueError("it is garbled (a box is not in its tensor)")
    return ChunkStorageMetadata(offsets, sizes)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_a(str, fields["fqn"]), None if offset is None else _size(offset))


def _place(value: Any) -> Any:
    fields: dict[str, Any] = _asked(value, ".".join(STORAGE_INFO), dict)
    name, offset, length = _a(str, fields["relative_path"]), _a(int, fields["offset"]), _a(int, fields["length"])
    # a path must not lead out of the directory
    if os.path.basename(name) != name or name in ("", ".", "..") or min(offset, length) < 0:
        raise ValueError(f"it is garbled (a tensor lies at {offset} to {offset + length} of {name!r})")
    if fields.get("transform_descriptors"):
        raise ValueError("its tensors are packed in a way that is not this package's")
    return stored_at(name, offset, length)


def _size(value: Any) -> torch.Size:
    asked = _a(Asked, value)
    if asked.name != "torch.Size" or asked.arguments is None or asked.state is not None:
        raise TypeError(f"{asked.name} is out of place")
    (numbers,) = asked.arguments
    sizes = [_a(int, x) for x in _a(tuple, numbers)]
    if any(not 0 <= x < 1 << 63 for x in sizes):
        raise ValueError("it is garbled (a size is out of range)")
    return torch.Size(sizes)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    return _asked(value, f"{_HOME}.{kind}", dict)  # type: ignore[no-any-return]


def _asked(value: Any, name: str, state: type) -> Any:
    """The state of an object that was asked for by this name."""
    if _a(Asked, value).name != name or value.arguments != ():
        raise TypeError(f"{value.name} is out of place")
    return _a(state, value.state)


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} is out of place")
    return value
