"""What a single file holds for this package alone: a record of its own in the archive, of which `torch.load` takes no
notice. So what torch and plain Lightning read of the file is what one device writes."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from lightning_par.checkpoint.outline import OWN


def add(file: Any, content: Any) -> None:
    """Add a record to what ``torch.save`` has written.

    Args:
        file: open for reading and writing, in which one can go back.
        content: as for `torch.save`.

    Example::

        with open("last.ckpt", "r+b") as file:
            add(file, {"generators": saved_state()})
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(zipfile.ZipInfo(_name(archive)), buffer.getvalue())  # with no time of day


def read(file: Any, weights_only: bool | None = None) -> Any:
    """What `add` has added; None where nothing was.

    Args:
        file: open for reading, in which one can go back; of any format.
        weights_only: as for `torch.load`.

    Raises:
        pickle.UnpicklingError: there are other things in it than ``weights_only`` allows.
    """
    file.seek(0)
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        name = _name(archive)
        content = archive.read(name) if name in archive.namelist() else None
    return None if content is None else torch.load(io.BytesIO(content), "cpu", weights_only=weights_only)


def _name(archive: zipfile.ZipFile) -> str:
    """Torch looks for its records in one folder, which need not be called the same in all files."""
    return f"{archive.infolist()[0].filename.partition('/')[0]}/{OWN}"
