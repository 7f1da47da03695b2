"""Checkpoint files that are either whole or not there: a temporary file in the target folder, fsync, rename.

Lightning's own save holds the whole file in memory beside the model, writes it to the system's temporary folder and
moves it, which across file systems is a copy that a kill leaves half done.

The classes are made when first asked for, one in each Lightning namespace: importing this module imports no Lightning.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlparse

import torch

from lightning_par.checkpoint import rename
from lightning_par.checkpoint.disk_space import refuse_if_full, stored_bytes, writes

Namespace = Literal["lightning.pytorch", "pytorch_lightning"]

# The names in this module, under which pickle finds the classes again in a spawned process.
_CLASSES: dict[str, Namespace] = {
    "AtomicCheckpointIO": "lightning.pytorch",
    "AtomicCheckpointIOForPytorchLightning": "pytorch_lightning",
}


def save(checkpoint: Any, path: str) -> None:
    """Write what ``torch.save`` makes of ``checkpoint`` to the local ``path``, all of it or nothing.

    Tensors are streamed to the disk one after another, so that no second copy is held. Missing folders are made. An
    error leaves the old file and nothing else; a kill may leave one temporary file, which the next save to ``path``
    removes.

    Raises:
        OSError: the folder can't be made or written, or the disk is full: "No space left", with the sizes.
        Exception: whatever pickling ``checkpoint`` raises.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    temporary, needed = rename.unfinished(path), stored_bytes(checkpoint)
    refuse_if_full(path, needed)
    try:
        with writes(temporary, needed, path) as file:
            torch.save(checkpoint, file)
        rename.put_in_place(temporary, path)
    except BaseException:
        rename.remove(temporary)
        raise


def make_checkpoint_io(namespace: Namespace = "lightning.pytorch") -> Any:
    """A ``CheckpointIO`` of ``namespace`` that saves local files by `save`, and runs no code of what it loads unless
    ``weights_only=False`` is given.

    Remote paths (``s3://`` and the like) are left to Lightning's ``TorchCheckpointIO``, as is removing.
    """
    (name,) = (name for name, home in _CLASSES.items() if home == namespace)
    return getattr(sys.modules[__name__], name)()


def _local(path: Any) -> str | None:
    """``path`` on this machine; None where it is a URL of another."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    filesystem, local_path = url_to_fs(str(path))
    return local_path if type(filesystem) is LocalFileSystem else None


def _loaded_from_url(path: str, map_location: Any, weights_only: bool) -> Any:
    from fsspec.core import url_to_fs

    from lightning_par.checkpoint.checksums import Part, refuse_damaged
    from lightning_par.checkpoint.safe_load import reads

    files, place = url_to_fs(path)
    if not files.exists(place):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    with files.open(place, "rb") as file:
        part: Any = Part(file)
        try:
            with reads(path, weights_only):
                loaded = torch.load(part, map_location, weights_only=weights_only)
        except Exception:
            refuse_damaged(path, part, weights_only)  # which says better why
            raise
        refuse_damaged(path, part, weights_only)
        return loaded


def _downloaded(url: str) -> str:
    """Where `torch.hub` has put a file from the net."""
    return os.path.join(torch.hub.get_dir(), "checkpoints", os.path.basename(urlparse(url).path))


def _make_class(name: str, namespace: Namespace) -> type:
    base: Any = import_module(f"{namespace}.plugins.io").TorchCheckpointIO

    class AtomicCheckpointIO(base):
        """Lightning's ``TorchCheckpointIO``, with local files written whole or not at all, and mapped when loaded."""

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            """Save ``checkpoint`` to ``path``.

            Raises:
                TypeError: ``storage_options`` is given, as with Lightning's own.
            """
            local_path = _local(path)
            if storage_options is not None or local_path is None:
                super().save_checkpoint(checkpoint, path, storage_options)
            else:
                save(checkpoint, local_path)

        def load_checkpoint(
            self, path: Any, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
        ) -> dict[str, Any]:
            """Load the checkpoint at ``path``. Tensors of a local file are read from the disk as they are used.

            Args:
                path: of a file or a directory, local or a URL.
                map_location: as for `torch.load`.
                weights_only: as for `torch.load`; None is True at a URL, too, where Lightning's own means False.

            Raises:
                FileNotFoundError: there is none.
                pickle.UnpicklingError: it holds other things than ``weights_only`` allows; they are named.
                RuntimeError: it is cut short or garbled, or a tensor does not match its checksum; it is named.
            """
            from lightning_par.checkpoint import reading
            from lightning_par.checkpoint.checked_together import refuse_damaged_file
            from lightning_par.checkpoint.checksums import is_zip, refuse_damaged
            from lightning_par.checkpoint.safe_load import reads

            if reading.is_directory(str(path)):
                return reading.load_whole(str(path), weights_only)
            local_path = _local(path)
            if local_path is not None and os.path.isfile(local_path):
                refuse_damaged_file(str(path), local_path, weights_only)
                with open(local_path, "rb") as file:
                    zipped = is_zip(file)  # torch's format of old can't be mapped
                with reads(str(path), weights_only, local_path):
                    return torch.load(local_path, map_location, mmap=zipped, weights_only=weights_only)
            weights_only = weights_only is None or weights_only
            if not str(path).startswith("http"):
                return _loaded_from_url(str(path), map_location, weights_only)
            with reads(str(path), weights_only):
                loaded = super().load_checkpoint(path, map_location, weights_only)
            with suppress(FileNotFoundError), open(_downloaded(str(path)), "rb") as file:
                refuse_damaged(f"{path} (downloaded to {file.name})", file, weights_only)
            return loaded

    AtomicCheckpointIO.__name__ = AtomicCheckpointIO.__qualname__ = name
    return AtomicCheckpointIO


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_class(name, _CLASSES[name])
    return made
