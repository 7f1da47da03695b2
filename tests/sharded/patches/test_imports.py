"""An import of ours changes nothing of torch's, and keeps nothing of what a run has put in the place of torch's."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import lightning_par
from tests.helpers.globals_of_torch import answer_of_a_fork, attributes, differences
from tests.helpers.sources import trees_in

# Each answer is that of a fork, which begins without anything of ours: the first where nothing but torch is imported,
# without the last lines of ``import torch``, the others where all is that ours import of others.
_FORKS = """
import gc, json, os, sys
gc.disable()
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from tests.helpers.globals_of_torch import answer_of_a_fork, attributes, differences

def loaded():
    before = attributes()
    from lightning_par import autoload
    import lightning_par.checkpoint.files  # whose classes are made in either Lightning when they are asked for
    autoload.register()
    heavy = ("lightning", "pytorch_lightning", "torchmetrics")
    return [name for name in sys.modules if name.partition(".")[0] in heavy], differences(before, attributes())

first = answer_of_a_fork(loaded)
del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
torch._import_device_backends()
from tests.sharded.patches.test_imports import in_forks
print(json.dumps([first, *in_forks(*json.load(sys.stdin))]))
"""
_FOLDER = Path(lightning_par.__file__).parent


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """What these lines import when their module is imported: not what functions do."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _imports(getattr(node, part, []))


def in_forks(others: list[str], ours: list[str]) -> list[Any]:
    """What `_changed` and `_kept` say of imports of ``ours``, each in a process that has imported ``others``."""
    for name in others:
        with contextlib.suppress(Exception):  # it may be no module, but a name in one
            importlib.import_module(name)
    return [answer_of_a_fork(question, ours) for question in (_changed, _kept)]


def _changed(ours: list[str]) -> list[str]:
    """What their imports change of what others have."""
    before = attributes()
    for name in ours:
        importlib.import_module(name)
    return differences(before, attributes())


def _kept(ours: list[str]) -> list[Any]:
    """What is replaced, how many of ours are imported while it is, and what of it these keep."""
    from lightning_par.sharded.patches import all_kinds
    from lightning_par.sharded.patches.replacement import Replacement
    from lightning_par.strategies.namespace import LIGHTNING

    installed: list[Replacement] = []
    install = Replacement.install

    def noted(self: Replacement) -> None:
        install(self)
        installed.append(self)

    Replacement.install = noted  # type: ignore[method-assign]
    for patches in all_kinds(LIGHTNING):
        patches.hold(patches)
    replaced = {id(cast(Any, one)._ours): cast(Any, one)._name for one in installed}
    early = {*sys.modules}
    for module in pkgutil.walk_packages(lightning_par.__path__, "lightning_par."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    late = [name for name in sys.modules if name.startswith("lightning_par.") and name not in early]
    kept = [
        f"{module}.{name}"
        for module in late
        for name, value in vars(sys.modules[module]).items()
        if id(value) in replaced or id(getattr(value, "__self__", None)) in replaced
    ]
    return [sorted({*replaced.values()}), len(late), kept]


def test_torch_loads_no_more_of_this_than_the_names_of_strategies(forks: Any) -> None:
    heavy, changed = forks[0]
    assert heavy == [] and [name.rpartition(" object")[0] for name in changed] == [
        "tables.sys.meta_path.<lightning_par.strategies.registry._Finder"
    ]


@pytest.fixture(scope="module")
def forks() -> Any:
    files = sorted(_FOLDER.rglob("[a-z]*.py"))
    ours = [".".join(("lightning_par", *path.relative_to(_FOLDER).with_suffix("").parts)) for path in files]
    found = dict.fromkeys(name for path in files for name in _imports(trees_in(_FOLDER)[path].body))
    others = [name for name in found if name.partition(".")[0] not in ("", "lightning_par")]
    assert {"torch", "torch.nn.functional", "lightning_utilities.core.apply_func"} <= {*others}
    given = json.dumps([others, ours])
    done = subprocess.run([sys.executable, "-c", _FORKS], input=given, stdout=-1, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_an_import_changes_nothing(forks: Any) -> None:
    assert forks[1] == []  # where what it imports is there already


def test_no_module_keeps_what_a_run_puts_in_place_of_torchs(forks: Any) -> None:
    """What torch has is the same to a module of ours whenever it is imported: also while a run has replaced it."""
    replaced, late, kept = forks[2]
    assert {"data", "grad", "register_parameter"} <= {*replaced} and late > 50
    assert not kept
