"""The run that a launcher started, and may have started again: who can go on with whose checkpoints."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.rendezvous import uses_agent_store
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
    def of(cls, environment: Any, namespace: Namespace, world: Axis) -> LaunchedRun:
        """The one that this process belongs to; the first rank says so, and all must ask.

        Under an agent, as `torchrun`, it is what its store, or the agent of any host, was first used for: it lives as
        long as one of them, and no restart needs a name from the user. SLURM gives a job that it requeues the number
        it had.

        Args:
            environment: the strategy's ``cluster_environment``; the process group must be there.
            namespace: which Lightning's.
            world: all ranks.
        """
        if world.dry:
            return cls()
        store, rank = default_store(), world.rank
        if not store.check([f"{_KEY}/{rank}"]):
            store.set(f"{_KEY}/{rank}", _name_by_agent())
            if rank == 0:
                ranks = [f"{_KEY}/{each}" for each in range(environment.world_size())]
                names = {store.get(key).decode() for key in ranks} if _is_elastic() else set()
                store.set(_KEY, json.dumps(asdict(_found(environment, namespace, names - {""}))))
        run = cls(**json.loads(store.get(_KEY)))
        _tell_agent(run.name or "")
        return run


@dataclass
class _OfProcess:
    """What the first rank's process knows of the run that an agent has started it for.

    It may make its process group anew between fits, and with it the store: it belongs to the same attempt all the same.
    """

    run: LaunchedRun
    fits: int = 0


_OF_PROCESS: dict[str, _OfProcess] = {}
"""By the agent's number of the run, of which a process has one."""


def _found(environment: Any, namespace: Namespace, names: set[str]) -> LaunchedRun:
    if _is_elastic() and _agents_number() in _OF_PROCESS:
        return _OF_PROCESS[_agents_number()].run
    if _is_elastic():
        store = underlying_store()  # of the attempt's own where the agent shares none: then only agents remember
        known = {store.get(_KEY).decode()} if store.check([_KEY]) else names
        run = LaunchedRun(min(known, default=f"torchelastic {secrets.token_hex(16)}"), bool(known))
        store.set(_KEY, str(run.name))
        _OF_PROCESS[_agents_number()] = _OfProcess(run)
        return run
    slurm = namespace.from_fabric("plugins.environments", "SLURMEnvironment")
    if isinstance(environment, slurm) and environment.job_id() is not None:
        parts = [os.environ.get(f"SLURM_{part}", "") for part in ("CLUSTER_NAME", "JOB_ID", "STEP_ID")]
        return LaunchedRun(" ".join(["SLURM", *parts]), int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0)
    return LaunchedRun()


def _is_elastic() -> bool:
    """Whether an elastic agent, as torchrun, has started this process."""
    return uses_agent_store() or "TORCHELASTIC_RUN_ID" in os.environ


def _agents_number() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _file_of_agent() -> Path | None:
    """A file that goes with the agent which started this process: beside what it logs of each attempt."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = None if error_file is None else Path(error_file).parent.parent.parent
    return None if folder is None or not folder.is_dir() else folder / "lightning_par_run"


def _name_by_agent() -> str:
    file = _file_of_agent()
    return file.read_text() if file is not None and file.exists() else ""


def _tell_agent(name: str) -> None:
    """The agent of the first host, and the store with it, may be the one that is lost."""
    file = _file_of_agent()
    if file is not None and name and os.environ.get("LOCAL_RANK") == "0":
        with suppress(OSError):
            file.write_text(name)


def number_of_fit() -> int:
    """Which fit of its process this is; asked once a fit, on the first rank."""
    known = _OF_PROCESS.get(_agents_number()) if _is_elastic() else None
    if known is None:
        return int(default_store().add("lightning_par/fits", 1))
    known.fits += 1
    return known.fits


def batch_of_first_attempt(fit: int, batch: tuple[int, int]) -> tuple[int, int]:
    """Replicas and accumulation of the attempt that came to a fit first, where an agent knows; else ``batch``.

    A run that is started again before it has saved a checkpoint is to step on the same batches, too.

    Args:
        fit: which of the run.
        batch: of this attempt.
    """
    if not uses_agent_store():
        return batch
    key = f"lightning_par/batch of fit {fit}"
    store = underlying_store()
    if not store.check([key]):
        store.set(key, json.dumps(batch))
    replicas, accumulate = json.loads(store.get(key))
    return replicas, accumulate


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
