"""How the processes of a job come to be: Lightning's own launchers, chosen by where the user's code runs."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

from lightning_par.private.launchers import forking_launcher, script_launcher
from lightning_par.strategies.namespace import Namespace

StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]


def check_start_method(start_method: str) -> None:
    """Raises ValueError where ``start_method`` is none of `StartMethod`."""
    if start_method not in get_args(StartMethod):
        names = ", ".join(repr(name) for name in get_args(StartMethod))
        raise ValueError(f"start_method={start_method!r} is unknown; write one of {names}.")


def make_launcher(namespace: Namespace, strategy: Any, start_method: StartMethod) -> Any:
    """The launcher for ``strategy``, whose cluster environment and devices are known.

    Processes that torchrun, SLURM or another launcher started are never started again. ``"auto"`` runs a script once
    more for each further rank, and forks in a notebook, where there is no script to run.
    """
    environment = strategy.cluster_environment
    if start_method == "auto":
        start_method = "fork" if is_interactive() else "popen"
    if environment.creates_processes_externally or start_method == "popen":
        return script_launcher(namespace, environment, strategy.num_processes, strategy.num_nodes)
    return forking_launcher(namespace, strategy, start_method)


def is_interactive() -> bool:
    """Whether this is a notebook or a Python prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
