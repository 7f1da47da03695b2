"""What starts the processes of the ranks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightning_par.private.launchers import forking_launcher, script_launcher, take_children
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_launchers_are_made_and_known_to_lightning(namespace: Namespace) -> None:
    environment = namespace.from_fabric("plugins.environments", "LightningEnvironment")()
    script = script_launcher(namespace, environment, 2, 1)
    base = namespace.from_pytorch("strategies.launchers.launcher", "_Launcher")
    assert isinstance(script, base) and not script.is_interactive_compatible
    forking = forking_launcher(namespace, object(), "fork")
    assert isinstance(forking, base) and forking.is_interactive_compatible
    # What is replaced on the instance is what Lightning calls, with these arguments.
    collect = type(forking)._collect_rank_zero_results
    assert list(inspect.signature(collect).parameters) == ["self", "trainer", "results"]
    assert "trainer.lightning_module.state_dict()" in inspect.getsource(collect)
    assert "self._collect_rank_zero_results(trainer, results)" in inspect.getsource(type(forking))


@both
def test_a_script_launcher_forgets_processes_that_are_taken(namespace: Namespace) -> None:
    environment = namespace.from_fabric("plugins.environments", "LightningEnvironment")()
    launcher = script_launcher(namespace, environment, 2, 1)
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    launcher.procs.append(process)
    observer = namespace.from_fabric("strategies.launchers.subprocess_script", "_ChildProcessObserver")
    known = observer(main_pid=0, child_processes=launcher.procs)
    assert take_children(launcher) == [process] and process.wait() == 3
    assert known._run() and not launcher.procs  # it has nothing to end this process for


@both
def test_a_forked_rank_runs_what_lightning_would(namespace: Namespace) -> None:
    """Its arguments, and what ends a run in it, are as they are taken to be."""
    launcher = forking_launcher(namespace, SimpleNamespace(num_processes=1, accelerator=None), "fork")
    assert list(inspect.signature(type(launcher)._wrapping_function).parameters)[:3] == [
        "self",
        "process_idx",
        "trainer",
    ]
    assert "self._wrapping_function,\n" in inspect.getsource(type(launcher).launch)
    assert list(inspect.signature(namespace.from_pytorch("trainer.call", "_interrupt")).parameters) == [
        "trainer",
        "exception",
    ]
    with pytest.raises(SystemExit, match="1"):
        launcher._wrapping_function(0, None, _interrupted, (), {}, None)


def _interrupted() -> None:
    raise KeyboardInterrupt
