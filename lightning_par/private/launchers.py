"""What starts the processes of the ranks."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from lightning_par.strategies.namespace import Namespace

STARTED_BY = "LIGHTNING_PAR_STARTED_BY"
"""The environment variable with the number of the process that has started this one, where that is our launcher's."""


def lost_launcher() -> str | None:
    """The number of the process that has started this rank, where that has ended: nobody else ends what it started."""
    number = os.environ.get(STARTED_BY)
    if number is None or int(number) in (os.getpid(), os.getppid()):
        return None
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return number
    except OSError:
        return None
    return None


def script_launcher(namespace: Namespace, environment: Any, num_processes: int, num_nodes: int) -> Any:
    """The launcher that runs the user's script again for each rank, or nothing where processes are there already.

    Lightning has no public launcher; the callers of its strategies check for this very class.
    """
    if not environment.creates_processes_externally:
        os.environ[STARTED_BY] = str(os.getpid())  # which the processes that it starts will find in theirs
    launcher = namespace.from_pytorch("strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")
    return launcher(environment, num_processes, num_nodes)


def forking_launcher(namespace: Namespace, strategy: Any, start_method: str) -> Any:
    """The launcher that starts the ranks through ``torch.multiprocessing``.

    Rank 0 hands the weights back to the parent from ``module.state_dict()``, which under a sharded module would be its
    own part; here it is what the strategy writes into checkpoints.
    """
    launcher = namespace.from_pytorch("strategies.launchers.multiprocessing", "_MultiProcessingLauncher")(
        strategy, start_method=start_method
    )
    # On the instance, and through module-level functions, since 'spawn' pickles the launcher.
    launcher._collect_rank_zero_results = partial(_collect_whole_weights, launcher)
    return launcher


def _collect_whole_weights(launcher: Any, trainer: Any, results: Any) -> Any:
    module = trainer.lightning_module
    whole = trainer.strategy.lightning_module_state_dict()
    module.state_dict = lambda: whole
    try:
        return type(launcher)._collect_rank_zero_results(launcher, trainer, results)
    finally:
        del module.state_dict
