"""The strategy names reach Lightning from a string alone. Each case is a fresh interpreter."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.slow import long, slow

CLASSES = {
    "tensor_parallel": "TensorParallelStrategy",
    "pipeline_parallel": "PipelineParallelStrategy",
    "sequence_parallel": "SequenceParallelStrategy",
    "layer_placement": "LayerPlacementStrategy",
    "hybrid_parallel": "HybridParallelStrategy",
    "auto_parallel": "AutoParallelStrategy",
}
NAMES = tuple(CLASSES)
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def python(code: str, *args: str, env: dict[str, str] | None = None) -> str:
    """stdout and stderr of ``code`` run in a fresh interpreter, outside the checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "TORCH_DEVICE")) and k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=Path(__file__).parents[1],
        env={**clean, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# Each program is a fork of its own, off a process that has imported what takes Lightning seconds, but not Lightning:
# the first ones off one in which ``import torch`` has imported nothing of ours, the others after it has, beside a
# Lightning that is broken.
FORKS = """
import os, sys, traceback
import torch, torch._dynamo, torchmetrics

def run(names):
    for name in names:
        with open(name) as file:
            program = compile(file.read(), name, "exec")
        child = os.fork()
        if child == 0:
            said = os.open(name + ".said", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1), os.dup2(said, 2)
            try:
                exec(program, {"__name__": "__main__"})
                print("came to its end")
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)

folder, *names = sys.argv[1:]
border = names.index("--")
run(names[:border])
del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
sys.path.insert(0, folder)
torch._import_device_backends()  # with which an ``import torch`` ends
run(names[border + 1 :])
"""
Outputs = Callable[[str], str]


@pytest.fixture(scope="module")
def said(asked: Callable[[str], list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """What each program prints; it must come to its end."""
    used = {row["namespace"] for test in ("test_string_without_import", "test_lightning_cli") for row in asked(test)}
    folder = tmp_path_factory.mktemp("programs")
    (folder / "lightning").mkdir()
    (folder / "lightning" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
    not_loaded = {"light": LIGHT, "public": PUBLIC}
    if asked("test_reload_and_second_install"):
        not_loaded["reload"] = RELOAD
    programs = {"failing": FAILING, **{namespace: _in_use(namespace) for namespace in NAMESPACES if namespace in used}}
    mended = {name: f"import sys; sys.path.remove({str(folder)!r})\n{program}" for name, program in programs.items()}
    loaded = {"broken": BROKEN, **mended}
    for name, program in (not_loaded | loaded).items():
        (folder / name).write_text(program)
    first, second = ([str(folder / name) for name in programs] for programs in (not_loaded, loaded))
    python(FORKS, str(folder), *first, "--", *second, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})

    def read(name: str) -> str:
        text = (folder / f"{name}.said").read_text()
        assert text.endswith("came to its end\n"), text
        return text

    return read


def test_installed_with_entry_point() -> None:
    points = importlib.metadata.entry_points(group="torch.backends")
    assert "lightning_par.autoload:register" in [p.value for p in points], "run `pip install -e '.[test]'` first"


def _in_use(namespace: str) -> str:
    """Strings with no import of ours, then the command line."""
    home = "lightning_par" if namespace == "lightning.pytorch" else "lightning_par.pl"
    return f"""
import importlib, json, os, sys
from {namespace} import Trainer
from {namespace}.strategies import Strategy, StrategyRegistry

def build(**kwargs):
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **kwargs)
    assert isinstance(trainer.strategy, Strategy)
    return type(trainer.strategy).__name__

assert "lightning_par.mesh.axis" not in sys.modules
assert set({NAMES}) <= set(StrategyRegistry)
for name in {NAMES}:
    print("plain", build(strategy=name))
print("upper", build(strategy="TENSOR_Parallel"))
os.environ["PL_TRAINER_STRATEGY"] = "tensor_parallel"
print("env", build())
del os.environ["PL_TRAINER_STRATEGY"]

from {namespace}.cli import LightningCLI
from {namespace}.demos.boring_classes import BoringModel

def cli(*args):
    args = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", *args]
    return LightningCLI(BoringModel, run=False, args=args, save_config_callback=None).trainer.strategy

print("string", type(cli("--trainer.strategy=tensor_parallel")).__name__)
cls = "--trainer.strategy={home}.TensorParallelStrategy"
print("dotted", cli(cls, "--trainer.strategy.tensor_parallel_size=1").tensor_parallel_size)
cut = cli("--trainer.strategy={home}.PipelineParallelStrategy", "--trainer.strategy.schedule=zbv")
print("cut", cut.settings.schedule)
trace = LightningCLI(BoringModel, run=False, save_config_callback=None, args=[
    "--trainer.callbacks={home}.ScheduleTrace", "--trainer.callbacks.step=5"]).trainer.callbacks
print("trace", [c.step for c in trace if type(c).__name__ == "ScheduleTrace"])
trace = LightningCLI(BoringModel, run=False, save_config_callback=None, args=[
    "--trainer.callbacks={home}.ParallelTrace", "--trainer.callbacks.last=7"]).trainer.callbacks
print("steps", [(c.first, c.last) for c in trace if type(c).__name__ == "ParallelTrace"])
asked = {{"class_path": "{home}.TensorParallelStrategy", "init_args": {{"tensor_parallel_size": 1}}}}
print("class_path", cli("--trainer.strategy=" + json.dumps(asked)).tensor_parallel_size)
made = cli("--trainer.strategy.class_path={home}.TensorParallelStrategy")
assert type(made) is importlib.import_module("{home}").TensorParallelStrategy
try:
    cli(cls, "--trainer.strategy.no_such_argument=1")
except SystemExit:
    print("refused")
"""


@long()
@slow("pytorch_lightning")
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_string_without_import(namespace: str, said: Outputs) -> None:
    out = said(namespace)
    assert all(f"plain {name}" in out for name in CLASSES.values())
    for way in ("upper", "env"):
        assert f"{way} TensorParallelStrategy" in out


@slow("pytorch_lightning")
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lightning_cli(namespace: str, said: Outputs) -> None:
    out = said(namespace)
    assert "string TensorParallelStrategy" in out
    assert (
        "dotted 1" in out
        and "class_path 1" in out
        and "cut zbv" in out
        and "trace [5]" in out
        and "steps [(2, 7)]" in out
    )
    assert "refused" in out and "no_such_argument" in out


RELOAD = f"""
import importlib, inspect, sys
import lightning.pytorch.strategies as strategies
from lightning_par import autoload, registry
assert set({NAMES}) <= set(strategies.StrategyRegistry)
first = strategies.StrategyRegistry["tensor_parallel"]
autoload.register(); registry.install()
assert strategies.StrategyRegistry["tensor_parallel"] is first
assert sum(isinstance(f, registry._Finder) for f in sys.meta_path) == 1

importlib.reload(strategies)
assert strategies.StrategyRegistry["tensor_parallel"] is not first
assert "StrategyRegistry" in inspect.getsource(strategies)
assert "exec_module" not in vars(strategies.__loader__) and strategies.__spec__.loader is strategies.__loader__
assert importlib.util.find_spec("lightning.pytorch.strategies").origin == strategies.__file__
importlib.reload(registry); registry.install()
"""


@slow()
def test_reload_and_second_install(said: Outputs) -> None:
    """Also: without autoload, ours imported after Lightning registers the names."""
    said("reload")


def test_our_names_import_nothing() -> None:
    python("""
import sys
import lightning_par
assert "torch" not in sys.modules and "lightning" not in sys.modules
assert set(lightning_par.__all__) <= set(dir(lightning_par))
""")


PUBLIC = f"""
import sys
import lightning_par
assert "lightning" not in sys.modules
from lightning_par import *
import lightning_par.mesh.layout, lightning_par.mesh.axis
assert Layout is lightning_par.mesh.layout.Layout and ledger is lightning_par.mesh.ledger.ledger
import lightning_par.strategies.lightning as home
for name in lightning_par.strategies.registry.CLASSES.values():
    assert globals()[name] is getattr(home, name)
assert ScheduleTrace is home.ScheduleTrace
assert not hasattr(lightning_par, "no_such_name")
from lightning.pytorch.strategies import StrategyRegistry
assert set({NAMES}) <= set(StrategyRegistry)
"""


def test_public_names(said: Outputs) -> None:
    """Also: without autoload, ours imported before Lightning registers the names."""
    said("public")


LIGHT = """
import sys
before = set(sys.modules)
import lightning_par.autoload
lightning_par.autoload.register()
print("new", sorted(set(sys.modules) - before))
"""


def test_what_torch_imports_of_ours_imports_nothing_else(said: Outputs) -> None:
    ours = ["lightning_par", *(f"lightning_par.{name}" for name in ("autoload", "strategies", "strategies.registry"))]
    assert f"new {ours}" in said("light")


BROKEN = """
import torch
print(torch.ones(2).sum().item())
try:
    import lightning
except RuntimeError as error:
    print(error)
"""


def test_torch_imports_beside_a_broken_lightning(said: Outputs) -> None:
    assert said("broken").split("\n")[:2] == ["2.0", "broken on purpose"]


FAILING = """
import lightning_par.strategies.registry as registry
def fail(module): raise RuntimeError("no registry here")
registry.register_names = fail
import torch, lightning.pytorch
from lightning_par.autoload import register
registry.install = fail
register()
print("imported", lightning.pytorch.Trainer.__name__)
"""


def test_torch_and_lightning_import_when_registration_fails(said: Outputs) -> None:
    out = said("failing")
    assert "imported Trainer" in out and "could not register" in out


def test_a_class_without_arguments_on_the_command_line_is_a_name() -> None:
    """LightningCLI hands on its path, which the Trainer writes in lower case."""
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_par
    from lightning_par.strategies.registry import install

    install()
    for cls in CLASSES.values():
        made = StrategyRegistry.get(f"lightning_par.{cls}".lower())
        assert type(made) is getattr(lightning_par, cls)
