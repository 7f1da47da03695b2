"""What starts the processes of the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

from lightning_par.strategies.namespace import Namespace
from lightning_par.strategies.signals import Signals

_START = 5.0  # seconds that a fork may take


def script_launcher(namespace: Namespace, environment: Any, num_processes: int, num_nodes: int) -> Any:
    """The launcher that runs the user's script again for each rank, or nothing where processes are there already.

    Lightning has no public launcher; the callers of its strategies check for this very class.
    """
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
    launcher.launch = partial(_launch_and_pass_signals_on, launcher, namespace)
    launcher._wrapping_function = partial(_run_rank, launcher, namespace)
    return launcher


def take_children(launcher: Any) -> list[subprocess.Popen[bytes]]:
    """The processes that a `script_launcher` has started here, of which it then knows no longer.

    Else it ends all of them, and this one, by SIGKILL, as soon as one ends with another code than 0, or after Ctrl-C.
    """
    known = getattr(launcher, "procs", [])
    taken = [process for process in known if isinstance(process, subprocess.Popen)]
    for process in taken:
        known.remove(process)
    return taken


def _run_rank(launcher: Any, namespace: Namespace, index: int, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """What a process runs that was started for a rank. Lightning ends a run that is told to end in the process that
    has started the ranks alone, and takes Ctrl-C in a rank's for its good end, whose results it then waits for."""
    try:
        type(launcher)._wrapping_function(launcher, index, trainer, *args, **kwargs)
    except BaseException as exception:
        if trainer is not None and trainer.strategy.has_stopped_by(exception):
            namespace.from_pytorch("trainer.call", "_interrupt")(trainer, exception)
            trainer._teardown()
        if isinstance(exception, KeyboardInterrupt):
            sys.exit(1)  # as Lightning's own launcher of scripts
        raise


def _launch_and_pass_signals_on(launcher: Any, namespace: Namespace, *args: Any, **kwargs: Any) -> Any:
    """`launch`, in a process that is no rank: of a signal that it receives alone, as from a notebook, its ranks would
    never know; and it raises what they raise for it, not that they have ended."""
    passed: list[int] = []

    def pass_on(number: int) -> None:
        passed.append(number)
        end = time.monotonic() + _START
        while not launcher.procs and time.monotonic() < end:
            time.sleep(0.02)
        for process in launcher.procs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    signals = Signals(pass_on, lambda: None)
    signals.start()
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signals.install([signal.SIGTERM, signal.SIGINT] if own else [signal.SIGTERM])
    try:
        return type(launcher).launch(launcher, *args, **kwargs)
    except Exception:
        if not passed:
            raise
        if passed[0] == signal.SIGINT:
            raise KeyboardInterrupt from None
        kind = namespace.from_pytorch("utilities.exceptions", "SIGTERMException")
        raise kind(128 + passed[0]) from None
    finally:
        signals.close()


def _collect_whole_weights(launcher: Any, trainer: Any, results: Any) -> Any:
    module = trainer.lightning_module
    whole = trainer.strategy.lightning_module_state_dict()
    module.state_dict = lambda: whole
    try:
        return type(launcher)._collect_rank_zero_results(launcher, trainer, results)
    finally:
        del module.state_dict
