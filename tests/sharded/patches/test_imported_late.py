"""What torch has is the same to a module of ours whenever it is imported: also while a run has replaced it."""

from __future__ import annotations

import json
import subprocess
import sys

_KEPT = """
import importlib, json, pkgutil, sys
import lightning_par
from lightning_par.sharded.patches import all_kinds
from lightning_par.sharded.patches.replacement import Replacement
from lightning_par.strategies.namespace import LIGHTNING

installed, install = [], Replacement.install
Replacement.install = lambda self: (install(self), installed.append(self))
for patches in all_kinds(LIGHTNING):
    patches.hold(patches)
ours = {id(r._ours): r._name for r in installed}
early = {*sys.modules}
for module in pkgutil.walk_packages(lightning_par.__path__, "lightning_par."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
late = [name for name in sys.modules if name.startswith("lightning_par.") and name not in early]
kept = [
    f"{module}.{name}"
    for module in late
    for name, value in vars(sys.modules[module]).items()
    if id(value) in ours or id(getattr(value, "__self__", None)) in ours
]
print(json.dumps([sorted({*ours.values()}), len(late), kept]))
"""


def test_no_module_keeps_what_a_run_puts_in_place_of_torchs() -> None:
    ended = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    replaced, late, kept = json.loads(ended.stdout)
    assert {"apply", "data", "grad", "register_parameter"} <= {*replaced} and late > 50
    assert not kept
