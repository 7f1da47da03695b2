"""A checkpoint as a directory of `torch.distributed.checkpoint`, to which each rank writes what it holds.

It has the files of Lightning's own: ``.metadata`` says which file has which box of which tensor, ``meta.pt`` holds all
but the tensors, ``__0_0.distcp`` and so on are the ranks'. It is written beside its place, and gets its name when all
of it is on the disk. At a URL, where names can't be changed, ``.metadata`` comes last: without it there is nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from lightning_par.checkpoint import swap
from lightning_par.checkpoint.chunks import Chunk, Writers, chunks_of, share_out, whole_chunk
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.outline import Outline, take_apart
from lightning_par.checkpoint.storage import Planner, writer_for
from lightning_par.checkpoint.unread import Unread

META = "meta.pt"


class Writing:
    """A directory that is being written. All ranks do the same with it.

    Args:
        path: where it goes, local or a URL.
        inventory: the tensors of the checkpoint.

    Example::

        writing = Writing("last.ckpt", inventory)
        writing.begin(checkpoint, [])
        writing.finish()
    """

    def __init__(self, path: str, inventory: Inventory) -> None:
        self.inventory = inventory
        self.is_local = "://" not in path or path.startswith("file://")
        self.path = str(url_to_fs(path)[1]) if self.is_local else path
        self.at = swap.beside(self.path) if self.is_local else path
        self.outline = Outline()
        self.planner = Planner([], {}, {})
        self.tensors: dict[str, Tensor] = {}

    def begin(self, checkpoint: Mapping[str, Any], parameters: Sequence[Mapping[int, str]]) -> None:
        """Write all but tensors, and decide who writes these.

        Args:
            checkpoint: as `Inventory.complete` made it; the first rank's counts.
            parameters: for each optimizer, the names of its parameters by their id.
        """
        with self.inventory.open():
            if self.inventory.is_first:
                self.outline = take_apart(checkpoint, parameters)
                self._make_folder()
                self._write_rest()
        chunks = self._chunks()
        self.planner = Planner(chunks, self.outline.values, self.outline.paths)
        self.tensors = self.planner.tensors()

    def stage(self) -> None:
        """Copy this rank's tensors, so that training may go on while they are written."""
        self.tensors = {key: x.to("cpu", copy=True) for key, x in self.tensors.items()}

    def finish(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the tensors, and give the directory its name.

        Args:
            group: of all ranks, where other threads use the usual one.

        Raises:
            RuntimeError: a rank could not; on all ranks. What had the name before still has it.
        """
        failure = None
        try:
            writer = writer_for(self.at, self.outline.aliases)
            dcp.save(self.tensors, storage_writer=writer, planner=self.planner, process_group=group)
            if self.inventory.is_first:
                self._publish()
        except CheckpointException as error:  # no Exception; all ranks have it
            causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            failure = "; ".join(f"Rank {rank}: {type(x).__name__}: {x}" for rank, x in causes.items())
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        told = [failure]
        dist.broadcast_object_list(told, src=0, group=group)
        failure = failure or told[0]
        if failure is not None:
            if self.inventory.is_first and self.is_local:
                swap.remove(self.at)
            raise RuntimeError(f"The checkpoint {self.path} could not be saved. {failure}")

    # --------------------------------------------------------------------------------------------------- on the first

    def _make_folder(self) -> None:
        if self.is_local:
            swap.remove(self.at)  # what a kill has left
            os.makedirs(self.at)
            return
        files, folder = url_to_fs(self.at)
        with suppress(FileNotFoundError):
            files.rm(f"{folder}/.metadata")  # what is there is no checkpoint any more
        files.makedirs(folder, exist_ok=True)

    def _write_rest(self) -> None:
        files, folder = url_to_fs(self.at)
        with files.open(f"{folder}/{META}", "wb") as file:
            torch.save(self.outline.rest, file)
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())

    def _publish(self) -> None:
        if self.is_local:
            swap.sync_folder(self.at)
            swap.put_in_place(self.at, self.path)

    # ------------------------------------------------------------------------------------------------------ on all

    def _chunks(self) -> list[Chunk]:
        tensors, groups = self.outline.tensors, self.inventory.groups
        items = {name: self.inventory.item_of(x) for name, x in tensors.items()}
        numbers = {name: item.number for name, item in items.items() if item is not None and item.place.shape.numel()}
        places = [item.place for item in self.inventory.items]
        shared: dict[str, Writers] = share_out(numbers, places, groups.layout)
        shared = groups.world.broadcast_object(shared, "state")
        own = [whole_chunk(name, _plain(x)) for name, x in tensors.items() if name not in shared]
        return [*own, *chunks_of(self.inventory, shared)]


def _plain(x: Tensor) -> Tensor:
    return x.read() if isinstance(x, Unread) and x.numel() else x.detach() if type(x) is Tensor else torch.empty_like(x)
