"""A checkpoint as a directory of `torch.distributed.checkpoint`, to which each rank writes what it holds.

``.metadata`` says which file has which box of which tensor, ``meta.<id>.pt`` holds all but the tensors,
``__0_0.<id>.distcp`` and so on are the ranks'. Locally it is written beside its place, and gets its name when all of it
is on the disk. At a URL, where directories can't be exchanged, it is written beside the files of the one before, and
what counts is the one that ``.metadata`` names.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from lightning_par.absent.unread import Unread
from lightning_par.checkpoint import rename
from lightning_par.checkpoint.chunks import Chunk, Writers, chunks_of, share_out, whole_chunk
from lightning_par.checkpoint.dcp_writer import Planner, Writer, write_rest
from lightning_par.checkpoint.disk_space import Failure, refuse_if_full
from lightning_par.checkpoint.folder import Folder
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.outline import Outline, take_apart


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
        self.folder = Folder(*url_to_fs(path))
        self.path = self.folder.place if self.folder.is_local else path
        self.save = uuid.uuid4().hex[:16]
        self.rest: WriteResult | None = None
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
                try:
                    self.rest = write_rest(self.outline.rest, self.folder, self.save)
                except BaseException:
                    self._give_up()
                    raise
        chunks = self.chunks()
        self.planner = Planner(chunks, self.outline.values, self.outline.paths)
        self.tensors = self.planner.tensors()

    def stage(self) -> None:
        """Copy this rank's tensors, so that training may go on while they are written."""
        # a copy of what is on the CPU, too
        self.tensors = {key: x.to("cpu", copy=True) for key, x in self.tensors.items()}

    def finish(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the tensors, and give the directory its name.

        Args:
            group: of all ranks, where other threads use the usual one.

        Raises:
            RuntimeError: a rank could not; on all ranks. What had the name before still has it.
            OSError: with the ``errno`` of a rank's disk that is full; on all ranks.
        """
        failure: Failure | None = None
        try:
            writer = Writer(self.folder, self.save, self.outline.aliases, self.rest)
            dcp.save(self.tensors, storage_writer=writer, planner=self.planner, process_group=group)
            if self.inventory.is_first:
                self._publish()
        except CheckpointException as error:  # no Exception; all ranks have it
            causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            failure = Failure.of(*causes.values(), names=[f"Rank {rank}: " for rank in causes])
        except Exception as error:
            failure = Failure.of(error)
        told = [failure]  # the first rank alone publishes: that it failed is news to the others
        dist.broadcast_object_list(told, src=0, group=group)
        failure = failure or told[0]
        if failure is not None:
            if self.inventory.is_first:
                self._give_up()
            raise failure.error(f"The checkpoint {self.path} could not be saved. ")

    # --------------------------------------------------------------------------------------------------- on the first

    def _make_folder(self) -> None:
        if not self.folder.is_local:
            self.folder.files.makedirs(self.folder.place, exist_ok=True)
            self.folder.tidy()
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        # of all ranks, whose files lie on one disk
        refuse_if_full(self.path, sum(x.numel() * x.dtype.itemsize for x in self.outline.tensors.values()))
        place = rename.unfinished(self.path)
        os.mkdir(place)
        self.folder = replace(self.folder, place=place)

    def _publish(self) -> None:
        self.folder.publish()
        if self.folder.is_local:
            rename.sync_folder(self.folder.place)
            rename.put_in_place(self.folder.place, self.path)
        else:
            self.folder.tidy()

    def _give_up(self) -> None:
        if self.folder.is_local:
            rename.remove(self.folder.place)
        else:
            self.folder.tidy()

    # ------------------------------------------------------------------------------------------------------ on all

    def chunks(self) -> list[Chunk]:
        """What this rank writes of the tensors of the outline, which the first rank has."""
        tensors, groups = self.outline.tensors, self.inventory.groups
        items = {name: self.inventory.item_of(x) for name, x in tensors.items()}
        numbers = {name: item.number for name, item in items.items() if item is not None and item.place.shape.numel()}
        places = [item.place for item in self.inventory.items]
        shared: dict[str, Writers] = share_out(numbers, places, groups.layout)
        shared, place = groups.world.broadcast_object((shared, self.folder.place), "state")
        self.folder = replace(self.folder, place=place)  # locally it is one that the first rank has made up
        others = tensors if groups.world.rank == 0 else {}
        own = [whole_chunk(name, _plain(x)) for name, x in others.items() if name not in shared]
        return [*own, *chunks_of(self.inventory, shared)]


def _plain(x: Tensor) -> Tensor:
    return x.read() if isinstance(x, Unread) and x.numel() else x.detach() if type(x) is Tensor else torch.empty_like(x)
