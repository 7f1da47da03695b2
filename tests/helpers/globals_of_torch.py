"""What a process' torch, Lightning and a few modules of Python's are: all attributes of all modules and classes."""

from __future__ import annotations

import builtins
import copy
import copyreg
import gc
import json
import logging
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

PACKAGES = frozenset(
    """
    torch lightning pytorch_lightning lightning_fabric torchmetrics builtins copy copyreg pickle random logging numpy
    warnings
""".split()
)

Key = tuple[str, str, str]  # module, class and attribute


DATA = object()


def attributes() -> dict[Key, Any]:
    """The functions, classes and descriptors that there are, each in its place; and the members of Python's tables.

    Of other attributes, as counters and caches, no more is told than that they are `DATA`.
    """
    found: dict[Key, Any] = {}
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] in PACKAGES:
            _add(found, module.__name__, "", vars(module))
            for kind in [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]:
                _add(found, module.__name__, kind.__qualname__, vars(kind))
    for name, table in _tables().items():
        members = table.items() if isinstance(table, dict) else [(x, x) for x in table]
        found.update({("tables", name, f"{key}"): x for key, x in members})
    return found


def differences(before: dict[Key, Any], after: dict[Key, Any]) -> list[str]:
    """What has changed, gone or come, but for modules that were imported since, and what was not there yet."""
    changed = [key for key, x in before.items() if x is not DATA and after.get(key) is not x]
    modules = {module for module, _, _ in before}
    come = [key for key in after.keys() - before.keys() if after[key] is not DATA and key[0] in modules]
    return [".".join(filter(None, key)) for key in sorted([*changed, *come])]


def _add(found: dict[Key, Any], module: str, kind: str, held: Any) -> None:
    for name, x in [*held.items()]:
        if f"{module}.{name}" not in sys.modules:
            found[module, kind, name] = x if callable(x) or hasattr(type(x), "__get__") else DATA


def _codes() -> dict[str, Any]:
    """What the functions of `torch.distributed` and `torch.autograd` do, and `torch.autograd.Function`'s methods, by
    their names."""
    names = ("distributed", "distributed._functional_collectives", "autograd")
    modules = [sys.modules.get(f"torch.{name}") for name in names]
    methods = vars(torch.autograd.Function).items()
    of_functions = {name: x.__func__.__code__ for name, x in methods if isinstance(x, (classmethod, staticmethod))}
    return {"codes of torch.autograd.Function": of_functions} | {
        f"codes of {module.__name__}": {
            name: x.__code__ for name, x in vars(module).items() if isinstance(x, FunctionType)
        }
        for module in modules
        if module is not None
    }


def _tables() -> dict[str, Any]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = {name: x for name, x in vars(module).items() if name.startswith("_global_") and isinstance(x, dict)}
    steps = {name: x for name, x in vars(optimizer).items() if name.startswith("_global_") and isinstance(x, dict)}
    return {
        **hooks,
        **steps,
        **_codes(),
        "copyreg.dispatch_table": copyreg.dispatch_table,
        "pickle.Pickler.dispatch": pickle._Pickler.dispatch,  # type: ignore[attr-defined]
        "pickle.Unpickler.dispatch": pickle._Unpickler.dispatch,  # type: ignore[attr-defined]
        "copy._copy_dispatch": copy._copy_dispatch,  # type: ignore[attr-defined]
        "copy._deepcopy_dispatch": copy._deepcopy_dispatch,  # type: ignore[attr-defined]
        "warnings.filters": warnings.filters,
        "sys.meta_path": sys.meta_path,
        "sys": {"stdout": sys.stdout, "stderr": sys.stderr, "excepthook": sys.excepthook},
        "threading.excepthook": [threading.excepthook],
        "gc.callbacks": gc.callbacks,
        "logging.root": [*logging.root.handlers, *logging.root.filters],
        "builtins": vars(builtins),
    }


def answer_of_a_fork(question: Callable[..., Any], *args: Any) -> Any:
    """What ``question`` returns in a fork of this process, which stays as it is; what JSON can say."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(write, "w") as answer:
            json.dump(question(*args), answer)
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return json.loads(said)
