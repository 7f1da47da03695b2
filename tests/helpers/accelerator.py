"""Where the Trainers of tests run: on CPU, and where a process has fake CUDA devices (`tests.gpu_rules`) on those."""

from __future__ import annotations

import os


def accelerator() -> str:
    """For ``Trainer(accelerator=...)``: "gpu" where the environment says ``TEST_ACCELERATOR=gpu``, else "cpu"."""
    return os.environ.get("TEST_ACCELERATOR", "cpu")


def device_type() -> str:
    """For torch: "cuda" or "cpu"."""
    return "cuda" if accelerator() == "gpu" else "cpu"
