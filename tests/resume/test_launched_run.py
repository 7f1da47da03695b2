"""Which run a process belongs to, and whether it was restarted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_par.resume import launched_run
from lightning_par.resume.launched_run import LaunchedRun, number_of_fit
from lightning_par.strategies.namespace import Namespace

ALONE: Any = SimpleNamespace(dry=False, rank=0)
ENVIRONMENT: Any = SimpleNamespace(world_size=lambda: 1)
NAMESPACE: Any = Namespace


def _fit() -> tuple[LaunchedRun, int]:
    """In a process group, and a store, of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return LaunchedRun.of(ENVIRONMENT, NAMESPACE, ALONE), number_of_fit()
    finally:
        dist.destroy_process_group()


def test_a_process_group_that_is_made_anew_between_fits_is_no_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "attempt_0" / "0"
    folder.mkdir(parents=True)
    for name, value in {"RUN_ID": "7", "ERROR_FILE": f"{folder / 'error.json'}"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(launched_run, "_OF_PROCESS", {})
    (first, one), (second, two) = _fit(), _fit()
    assert (first, one, two) == (second, 1, 2) and not first.restarted
    monkeypatch.setattr(launched_run, "_OF_PROCESS", {})  # as in a process that the agent starts next
    (third, one), (fourth, two) = _fit(), _fit()
    assert third == fourth == LaunchedRun(first.name, restarted=True) and (one, two) == (1, 2)
