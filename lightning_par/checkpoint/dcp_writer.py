"""How `torch.distributed.checkpoint` writes a directory of ours."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_par.checkpoint.chunks import Chunk
from lightning_par.checkpoint.folder import COMING, REST, Folder
from lightning_par.checkpoint.outline import Path
from lightning_par.private.checkpoints import stored_at

_SEPARATOR = "@"


class Planner(DefaultSavePlanner):
    """Plans to write the chunks of this rank.

    Args:
        chunks: what this rank writes.
        values: what it writes beside tensors, by name.
        paths: where things by name are in a nested dict; on the first rank.
    """

    def __init__(self, chunks: list[Chunk], values: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.chunks = {_key(chunk.name, chunk.offset): chunk for chunk in chunks}
        self.values, self.paths = values, paths

    def tensors(self) -> dict[str, Any]:
        """What to hand to `torch.distributed.checkpoint.save`."""
        return {key: chunk.values for key, chunk in self.chunks.items()}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [_item(chunk) for chunk in self.chunks.values()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.values]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        # torch's tools build nested dicts by it
        return plans, dataclasses.replace(metadata, planner_data=dict(self.paths))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type != WriteItemType.BYTE_IO:
            values: torch.Tensor = self.state_dict[_key(index.fqn, index.offset)]
            return values
        buffer = io.BytesIO()
        torch.save(self.values[index.fqn], buffer)
        return buffer


class Writer(StorageWriter):
    """Writes a rank's chunks into one file, one after another, and holds none; torch's own writer holds the last ones.

    Args:
        folder: where to.
        save: a part of the names of all files, so that they take no other's place; the first rank's counts.
        aliases: other names of tensors.
        rest: the file that holds all but the tensors, on the first rank.
    """

    def __init__(self, folder: Folder, save: str, aliases: Mapping[str, str], rest: WriteResult | None) -> None:
        self.folder, self.save, self.aliases, self.rest = folder, save, aliases, rest

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"__{rank}_0.{self.save}.distcp" for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        self.folder.must_be_shared()
        needed = sum(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
                     for item in plan.items if item.tensor_data is not None)  # fmt: skip
        with self.folder.writing(plan.storage_data, needed) as stream:
            for item in plan.items:
                start = stream.tell()
                _write(planner.resolve_data(item), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, stored_at(plan.storage_data, start, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found = [result for theirs in results for result in theirs]
        for alias, name in self.aliases.items():
            # tied weights are written once, and found by each name
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            same = [result for result in found if result.index.fqn == name]
            found += [dataclasses.replace(x, index=MetadataIndex(alias, x.index.offset)) for x in same]
        found += [] if self.rest is None else [self.rest]
        metadata.storage_data = {result.index: result.storage_data for result in found}
        with self.folder.writing(COMING) as file:
            pickle.dump(metadata, file)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def write_rest(rest: Any, folder: Folder, save: str) -> WriteResult:
    """Write all but the tensors."""
    name = f"meta.{save}.pt"
    with folder.writing(name) as file:
        torch.save(rest, file)
        length = file.tell()
    return WriteResult(REST, length, stored_at(name, 0, length))


def _write(data: Any, stream: Any) -> None:
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return
    values = data.detach().cpu()
    # `torch.save` writes all memory of a view.
    torch.save(values if values.untyped_storage().nbytes() == values.nbytes else values.clone(), stream)


def _key(name: str, offset: torch.Size | None) -> str:
    return f"{name}{_SEPARATOR}{tuple(offset or ())}"


def _item(chunk: Chunk) -> WriteItem:
    box = ChunkStorageMetadata(chunk.offset, chunk.values.shape)
    data = TensorWriteData(box, TensorProperties(dtype=chunk.values.dtype), chunk.shape)
    return WriteItem(MetadataIndex(chunk.name, chunk.offset), WriteItemType.SHARD, tensor_data=data)
