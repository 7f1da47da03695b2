"""Checkpoints of ranks on two hosts: whose disk they go to, and what is said where that is not shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_par.verdict.compare import TOLERANCE
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.hosts.network import hosts, left_behind, torchrun
from tests.hosts.train import resumed

DIRECTORY = dict(save_distributed_checkpoint=True)
PP2_TP2 = dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2)
FSDP = dict(data_parallel_size=2, tensor_parallel_size=2, data_parallel="fsdp")


def _run(folder: Path, layout: dict[str, object], own_disk: bool) -> tuple[list[int], str]:
    disk = folder / "disk"
    disk.mkdir()
    command = ["-m", "tests.hosts.train", "resumed", str(folder), json.dumps(layout), str(disk / "last.ckpt")]
    with hosts(2, named=True) as made:
        started = torchrun(made, 2, command, folder, disk if own_disk else None)
        codes = [process.wait(200) for process in started]
        assert not left_behind(made)
    return codes, "\n".join((folder / f"output-{index}").read_text() for index in range(2))


@slow()
@pytest.mark.parametrize("kind", [{}, DIRECTORY], ids=["file", "directory"])
def test_a_checkpoint_on_a_shared_disk_resumes(kind: dict[str, object], pool: Pool, tmp_path: Path) -> None:
    codes, said = _run(tmp_path, PP2_TP2 | kind, own_disk=False)
    assert codes == [0, 0], said
    (expected,) = pool.run(1, resumed, tmp_path, None, tmp_path / "alone.ckpt")
    for rank in range(4):
        found = torch.load(tmp_path / f"weights-{rank}.pt")
        assert all((x - expected[name]).abs().max() <= TOLERANCE for name, x in found.items()), rank


@slow()
def test_a_directory_on_disks_of_their_own_is_refused_by_all_ranks(tmp_path: Path) -> None:
    codes, said = _run(tmp_path, PP2_TP2 | DIRECTORY, own_disk=True)
    assert all(codes), said
    said = " ".join(said.split())
    for rank in range(4):
        assert f"[rank{rank}]: RuntimeError: The checkpoint" in said
    assert "Rank 2: FileNotFoundError: host 'host1' has no" in said and "a path that all hosts share" in said
    assert "Rank 0: FileNotFoundError" not in said
