"""What is written into checkpoint files, and read from them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, save

from lightning_par.private.checkpoints import (
    METADATA_NAMES,
    STORAGE_INFO,
    LateStorage,
    offset_in_file,
    parameter_of_pickle,
    reduced_late,
    stored_at,
)


def test_bytes_are_fetched_when_they_are_written() -> None:
    values = {"a": torch.randn(5, 3), "b": torch.arange(4).to(torch.uint16)}  # the second has no typed storage
    log: list[str] = []

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            log.extend(name for name, x in values.items() if bytes(data) == x.numpy().tobytes())
            return super().write(data)

    class Late:
        def __init__(self, name: str) -> None:
            self.name, x = name, values[name]
            self.storage = LateStorage(x.nbytes, self.fetch, x.data_ptr)

        def fetch(self) -> Any:
            log.append(f"fetch {self.name}")
            return values[self.name].untyped_storage()

        def __reduce_ex__(self, protocol: Any) -> Any:
            assert self.storage.data_ptr() == values[self.name].data_ptr() and self.storage.nbytes() > 0
            return reduced_late(values[self.name].shape, values[self.name].dtype, self.storage)

    file, plain = File(), io.BytesIO()
    torch.save({name: Late(name) for name in values}, file)
    assert log == ["fetch a", "a", "fetch b", "b"]
    file.seek(0)
    for name, x in torch.load(file, weights_only=True).items():
        assert torch.equal(x, values[name]) and x.device.type == "cpu"
    torch.save({"a": values["a"]}, plain)
    torch.save({"a": Late("a")}, late := io.BytesIO())
    assert late.getvalue() == plain.getvalue()


def test_a_parameter_is_pickled_by_a_function_of_tensor_flag_and_hooks() -> None:
    made, given, *_ = nn.Parameter(torch.ones(2), requires_grad=False).__reduce_ex__(2)
    assert made is parameter_of_pickle()
    again = made(*given)
    assert type(again) is nn.Parameter and again.sum() == 2 and not again.requires_grad


def test_metadata_of_a_distributed_checkpoint_names_these(tmp_path: Path) -> None:
    named: set[tuple[str, str]] = set()

    class Naming(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add((module, name))
            return super().find_class(module, name)

    save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    with open(tmp_path / ".metadata", "rb") as file:
        Naming(file).load()
    of_torch = {(module, name) for module, name in named if module.startswith("torch") and name.startswith("_")}
    assert of_torch == set(METADATA_NAMES) and STORAGE_INFO in named


def test_where_a_tensor_is_stored_is_told_to_torchs_reader(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    (found,) = metadata.storage_data.values()
    assert found == stored_at(found.relative_path, found.offset, found.length)


def test_where_the_bytes_of_a_storage_begin_in_a_file_is_told(tmp_path: Path) -> None:
    values = torch.arange(100.0)
    torch.save({"a": torch.ones(3), "b": values[10:20]}, tmp_path / "file")
    read = torch.load(tmp_path / "file", map_location="meta")
    content, start = (tmp_path / "file").read_bytes(), offset_in_file(read["b"])
    assert content[start : start + values.nbytes] == values.numpy().tobytes()
    assert offset_in_file(torch.ones(1)) == -1
