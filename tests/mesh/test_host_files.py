"""Whole tensors in files that the ranks of a host fill together, without a message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh import host_files
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.host_files import HostFiles
from lightning_par.mesh.ledger import ledger
from lightning_par.mesh.positions import Positions
from lightning_par.private.storage import is_mapped
from tests.helpers.pool import Pool

OWNERS = {"halves": [0, 0, 1, 1], "uneven": [0, 1, 1, 1], "in turns": [0, 1, 0, 1], "one has none": [1, 1, 1, 1]}
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8]


def _whole(dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)


def _files(folder: str) -> tuple[HostFiles, Axis, pytest.MonkeyPatch]:
    dist.init_process_group("gloo")
    axis = Axis("tensor", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    patch = pytest.MonkeyPatch()
    patch.setattr(host_files, "LEAST", 1)
    patch.setattr(host_files.tempfile, "tempdir", folder)
    return HostFiles(axis), axis, patch


def _gathered(folder: str, owners: dict[str, list[int]]) -> list[tuple[bool, float, list[str]]]:
    """For each tensor: whether it is right and in a file, the bytes sent for it; what is left in the folder."""
    files, axis, patch = _files(folder)
    seen = []
    try:
        for owner in owners.values():
            for dtype in DTYPES:
                whole, positions = _whole(dtype), Positions.of(owner)
                part = whole.index_select(1, torch.as_tensor(positions.indices(axis.rank)))
                with ledger() as moved:
                    found = files.gathered(part, 1, positions, axis)
                    handed = files.handed_on(whole if axis.rank == 1 else None, (whole.shape, dtype), axis)
                assert found is not None and handed is not None
                right = [torch.equal(x.view(torch.uint8), whole.view(torch.uint8)) for x in (found, handed)]
                found.view(torch.uint8).zero_()  # a rank's own page
                dist.barrier()
                right.append(torch.equal(handed.view(torch.uint8), whole.view(torch.uint8)))
                seen.append((all(right) and is_mapped(found) and is_mapped(handed), moved.sent(), []))
        files.close()
        dist.barrier()
        return [(right, sent, os.listdir(folder)) for right, sent, _ in seen]
    finally:
        patch.undo()


def test_each_rank_writes_its_part_and_nothing_of_it_is_sent(pool: Pool, tmp_path: Path) -> None:
    for seen in pool.run(2, _gathered, str(tmp_path), OWNERS):
        assert len(seen) == len(OWNERS) * len(DTYPES)
        assert all(right and left == [] for right, _, left in seen)
        assert {sent for _, sent, _ in seen} == {4 * 8.0}  # a number that it may be written, and one that it is


def _refused(folder: str, case: str) -> tuple[list[bool], list[str]]:
    files, axis, patch = _files(folder)
    try:
        part: Any = torch.ones(4, 4)
        if axis.rank == 1 and case == "strides":
            part = part.t()
        if axis.rank == 1 and case == "mapping":
            patch.setattr(torch.UntypedStorage, "from_file", _no_mapping)
        if axis.rank == 0 and case == "disk":
            patch.setattr(host_files, "_reserve", lambda path, nbytes: False)
        positions = Positions.of([0] * 4 + [1] * 4)
        none = [files.gathered(part, 0, positions, axis) is None]
        if case == "mapping":
            none.append(files.handed_on(part, (part.shape, part.dtype), axis) is None)
            kept = files.kept(part.contiguous(), axis)
            none.append(torch.equal(kept, part) and not is_mapped(kept))
        files.close()
        dist.barrier()
        return none, os.listdir(folder)
    finally:
        patch.undo()


def _no_mapping(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("unable to mmap: Cannot allocate memory (12)")


@pytest.mark.parametrize("case", ["strides", "mapping", "disk"])
def test_what_one_rank_can_t_do_none_does(case: str, pool: Pool, tmp_path: Path) -> None:
    for none, left in pool.run(2, _refused, str(tmp_path), case):
        assert all(none) and left == []
