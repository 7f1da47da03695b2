"""Where the Trainers of tests run: on CPU, and where a process has fake CUDA devices (`tests.gpu_rules`) on those."""

from __future__ import annotations

import os


def accelerator() -> str:
    """For ``Trainer(accelerator=...)``: "gpu" where the environment says ``TEST_ACCELERATOR=gpu``, else "cpu"."""
    return os.environ.get("TEST_ACCELERATOR", "cpu")


def device_type() -> str:
    """For torch: "cuda" or "cpu"."""
    return "cuda" if accelerator() == "gpu" else "cpu"


def devices() -> dict[str, int]:
    """For ``Trainer(**devices())``: one for each rank; where all share one, each is a host of its own to Lightning."""
    world_size = int(os.environ["WORLD_SIZE"])
    if "TEST_NODES" in os.environ:  # several hosts; see `tests.hosts`
        nodes = int(os.environ["TEST_NODES"])
        return {"devices": world_size // nodes, "num_nodes": nodes}
    if "TEST_SHARED_DEVICE" not in os.environ:
        return {"devices": world_size}
    os.environ.update(LOCAL_RANK="0", NODE_RANK=os.environ["RANK"])
    return {"devices": 1, "num_nodes": world_size}
