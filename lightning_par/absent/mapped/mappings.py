"""Which tensors lie in mapped files: their addresses tell, by what the system says of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.file import File
from lightning_par.absent.mapped.region import Region
from lightning_par.private.storage import memory_of, storage_of

_MAPS = Path("/proc/self/maps")
_REMOVED = " (deleted)"


@dataclass(frozen=True)
class _Mapping:
    """One piece of a file in memory: the addresses from ``start`` to ``stop`` hold what begins at ``offset``."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


class Mappings:
    """The files that are mapped while a module is loaded, and the regions in which its tensors lie.

    What it has told of stays mapped as long as it lives, so that an address means the same all the while.

    Example::

        mappings = Mappings()
        weights = torch.load("weights.pt", mmap=True)
        assert mappings.region(weights["0.weight"]).file.path.endswith("weights.pt")
        assert mappings.region(torch.ones(2)) is None
    """

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._files: dict[_Mapping, File] = {}

    @property
    def files(self) -> list[File]:
        """Those in which tensors were found, in that order."""
        return [*self._files.values()]

    @property
    def regions(self) -> list[Region]:
        """Those in which tensors were found."""
        return [*self._regions.values()]

    def region(self, x: Tensor) -> Region | None:
        """The memory of ``x``; None where that is no file's, or was written to."""
        storage = storage_of(x) if x.device.type == "cpu" and not x.is_quantized else None
        if storage is None or storage.resizable() or not storage.nbytes():  # what torch allocates is resizable
            return None
        key = memory_of(x)
        if key not in self._regions:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore
            region = self._found(memory)
            if region is None:
                return None
            self._regions[key] = region
        return self._regions[key]

    def _found(self, memory: Tensor) -> Region | None:
        start = memory.data_ptr()
        mapping = self._mapping(start, start + memory.numel())
        if mapping is None:
            return None
        try:
            file = self._files.get(mapping) or File(mapping.path)
            region = Region(file, mapping.offset + start - mapping.start, memory)
            known = file.inode == mapping.inode or _same(region)  # some file systems tell a mapping's otherwise
            if not known or not region.is_clean():
                return None
        except OSError:  # it can't be opened by this name any more, or the system does not say what was written
            return None
        self._files[mapping] = file
        return region

    def _mapping(self, start: int, stop: int) -> _Mapping | None:
        for mapping in self._files:  # a region of each, hence its addresses, are held
            if mapping.start <= start and stop <= mapping.stop:
                return mapping
        return next((m for m in _mapped_files() if m.start <= start and stop <= m.stop), None)


def _mapped_files() -> list[_Mapping]:
    """All files that are mapped so that writes stay this process's own; none where the system does not say."""
    found = []
    for line in _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else ():
        addresses, rights, offset, _, inode, *path = line.split(maxsplit=5)
        if path and rights.endswith("p") and int(inode) and not path[0].endswith(_REMOVED):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found.append(_Mapping(start, stop, int(offset, 16), int(inode), path[0].replace("\\012", "\n")))
    return found


def _same(region: Region) -> bool:
    """Whether the first page is the same in memory and in the file."""
    size = min(region.nbytes, 4096)
    there = region.file.read(Geometry((size,), (1,), 0, torch.uint8), region.start)
    return torch.equal(there, region.memory[:size])
