"""Pods of Kubernetes' PyTorchJob: the variables that it sets, in a namespace a pod."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_par.verdict.compare import TOLERANCE
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.hosts.network import PORT, TORCHRUN, hosts, left_behind
from tests.hosts.train import one_device

TRAIN = ["-m", "tests.hosts.train", "long"]
LAYOUTS = {1: dict(tensor_parallel_size=2), 2: dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2)}


@slow()
@pytest.mark.parametrize("each", [1, 2])
def test_pods_of_a_pytorch_job_train(each: int, pool: Pool, tmp_path: Path) -> None:
    """With torchrun within each, and without it, one process a pod."""
    program = [*TORCHRUN, *TRAIN] if each == 2 else [sys.executable, *TRAIN]
    with hosts(2, named=True) as pods:
        started = [
            pod.start(
                [*program, str(tmp_path), json.dumps(LAYOUTS[each]), "4", "60"], tmp_path / f"output-{pod.index}",
                MASTER_ADDR="host0", MASTER_PORT=f"{PORT}", WORLD_SIZE="2", RANK=f"{pod.index}",
                PET_MASTER_ADDR="host0", PET_MASTER_PORT=f"{PORT}", PET_NNODES="2", PET_NODE_RANK=f"{pod.index}",
                PET_NPROC_PER_NODE=f"{each}", PYTHONUNBUFFERED="1",
                TEST_NODES="2", **({} if each == 2 else {"TEST_KUBEFLOW": "1"}),
            )
            for pod in pods
        ]  # fmt: skip
        codes = [process.wait(150) for process in started]
        assert not left_behind(pods)
    assert codes == [0, 0], "\n".join((tmp_path / f"output-{index}").read_text() for index in range(2))
    (expected,) = pool.run(1, one_device, 4, str(tmp_path))
    for rank in range(2 * each):
        found = torch.load(tmp_path / f"weights-{rank}.pt")
        assert all((x - expected[name]).abs().max() <= TOLERANCE for name, x in found.items()), rank
