"""The run that a launcher started, and may have started again: who can go on with whose checkpoints."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from lightning_par.mesh.agent_store import uses_agent_store
from lightning_par.private.process_groups import default_store, underlying_store
from lightning_par.strategies.namespace import Namespace

_KEY = "lightning_par/launched run"
_FOLDERS = "lightning_par/checkpoint folders"


@dataclass(frozen=True)
class LaunchedRun:
    """What a launcher started.

    Args:
        name: no other run has it; None where no launcher says which run this is, as ``python train.py``.
        restarted: whether the launcher had started the run before.
    """

    name: str | None = None
    restarted: bool = False

    @classmethod
    def of(cls, environment: Any, namespace: Namespace, rank: int) -> LaunchedRun:
        """The one that this process belongs to; the first rank says so, and all must ask.

        Under an agent, as `torchrun`, it is what its store was first used for: it lives as long as the agent on the
        first host, and no restart needs a name from the user. SLURM gives a job that it requeues the number it had.

        Args:
            environment: the strategy's ``cluster_environment``; the process group must be there.
            namespace: which Lightning's.
            rank: this process's.
        """
        store = default_store()
        if rank == 0 and not store.check([_KEY]):
            store.set(_KEY, json.dumps(asdict(_found(environment, namespace))))
        return cls(**json.loads(store.get(_KEY)))


def _found(environment: Any, namespace: Namespace) -> LaunchedRun:
    if uses_agent_store():
        new = f"torchelastic {secrets.token_hex(16)}"
        name = underlying_store().compare_set(_KEY, "", new).decode()
        return LaunchedRun(name, name != new)
    slurm = namespace.from_fabric("plugins.environments", "SLURMEnvironment")
    if isinstance(environment, slurm) and environment.job_id() is not None:
        parts = [os.environ.get(f"SLURM_{part}", "") for part in ("CLUSTER_NAME", "JOB_ID", "STEP_ID")]
        return LaunchedRun(" ".join(["SLURM", *parts]), int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0)
    run, count = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    if run not in ("", "none"):  # what torchrun calls all runs that nobody gave a name
        return LaunchedRun(f"torchelastic {run}", int(count) > 0)
    return LaunchedRun()


def number_of_fit() -> int:
    """Which fit of its process this is; asked once a fit, on the first rank."""
    return int(default_store().add("lightning_par/fits", 1))


def note_folder(folder: str) -> None:
    """Let restarts know that there are checkpoints in ``folder``, whose name a logger may have made up."""
    if uses_agent_store():
        known = noted_folders()
        if folder not in known:
            underlying_store().set(_FOLDERS, json.dumps([*known, folder]))


def noted_folders() -> list[str]:
    """What `note_folder` noted, in this attempt and those before."""
    if not uses_agent_store() or not underlying_store().check([_FOLDERS]):
        return []
    return list(json.loads(underlying_store().get(_FOLDERS)))
