"""How `torch.distributed.checkpoint` writes a directory of ours, and reads one."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_par import private
from lightning_par.checkpoint.chunks import Chunk
from lightning_par.checkpoint.outline import Path

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
        return plans, dataclasses.replace(metadata, planner_data=dict(self.paths))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type != WriteItemType.BYTE_IO:
            values: torch.Tensor = self.state_dict[_key(index.fqn, index.offset)]
            return values
        buffer = io.BytesIO()
        torch.save(self.values[index.fqn], buffer)
        return buffer


class _Streams:
    """Writes a rank's chunks into one file, one after another, and holds none; torch's writer holds the last ones."""

    aliases: Mapping[str, str] = {}

    def write_data(self: Any, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in plan.items:
                start = stream.tell()
                _write(planner.resolve_data(item), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, private.stored_at(name, start, length)))
            stream.flush()
            if hasattr(stream, "fileno") and isinstance(stream, io.BufferedWriter):
                os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self: Any, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found = [result for theirs in results for result in theirs]
        for alias, name in self.aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            same = [result for result in found if result.index.fqn == name]
            results = [*results, [dataclasses.replace(x, index=MetadataIndex(alias, x.index.offset)) for x in same]]
        super().finish(metadata, results)  # type: ignore[misc]


def writer_for(path: str, aliases: Mapping[str, str]) -> FileSystemWriter:
    """What writes a directory to ``path``, here or at a URL."""
    base: Any = FileSystemWriter if "://" not in path else private.remote_checkpoints()[0]
    made = type("Writer", (_Streams, base), {})(path)
    made.aliases = aliases
    return made  # type: ignore[no-any-return]


def _write(data: Any, stream: Any) -> None:
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return
    values = data.detach().cpu()
    torch.save(values if values.untyped_storage().nbytes() == values.nbytes else values.clone(), stream)


def _key(name: str, offset: torch.Size | None) -> str:
    return f"{name}{_SEPARATOR}{tuple(offset or ())}"


def _item(chunk: Chunk) -> WriteItem:
    box = ChunkStorageMetadata(chunk.offset, chunk.values.shape)
    data = TensorWriteData(box, TensorProperties(dtype=chunk.values.dtype), chunk.shape)
    return WriteItem(MetadataIndex(chunk.name, chunk.offset), WriteItemType.SHARD, tensor_data=data)
