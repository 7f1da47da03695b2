"""What starts the processes of the ranks."""

from __future__ import annotations

import inspect

import pytest

from lightning_par.private.launchers import forking_launcher, script_launcher
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
