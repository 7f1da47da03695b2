"""The strategy names, and how Lightning learns them without an import of this package.

Lightning keeps one registry in each of its two namespaces, made when ``<namespace>.strategies`` is executed. `install`
writes the names into those that exist, and puts a finder on ``sys.meta_path`` that writes them into those that are made
later. Imports nothing heavy: it runs inside ``import torch``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

CLASSES = {
    "tensor_parallel": "TensorParallelStrategy",
    "pipeline_parallel": "PipelineParallelStrategy",
    "sequence_parallel": "SequenceParallelStrategy",
    "layer_placement": "LayerPlacementStrategy",
    "hybrid_parallel": "HybridParallelStrategy",
    "auto_parallel": "AutoParallelStrategy",
}

# The module that holds a namespace's registry -> our module with the classes made for that namespace.
HOMES = {
    "lightning.pytorch.strategies": "lightning_par.strategies.lightning",
    "pytorch_lightning.strategies": "lightning_par.pl",
}

_log = logging.getLogger(__name__)


def register_names(strategies: ModuleType) -> None:
    """Write the names into the registry of ``strategies``, one of `HOMES`. Names already there are left alone."""
    registry = getattr(strategies, "StrategyRegistry", None)
    if registry is None:
        return
    for name, cls in CLASSES.items():
        # LightningCLI takes a class that is given no arguments for a name, which the Trainer writes in lower case
        for known in (name, f"lightning_par.{cls}".lower()):
            if known not in registry:
                registry.register(known, _factory(name, HOMES[strategies.__name__]), description=f"lightning_par.{cls}")


def _factory(name: str, home: str) -> Callable[..., Any]:
    def make(**init_args: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(home), CLASSES[name])(**init_args)

    return make


def install() -> None:
    """Register the names in every Lightning namespace, now or as soon as it is imported. Safe to call again."""
    for name in HOMES:
        module = sys.modules.get(name)
        if module is not None:
            _try_to_register(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _try_to_register(strategies: ModuleType) -> None:
    # This runs inside the imports of torch and Lightning, which must not fail because of us.
    try:
        register_names(strategies)
    except Exception as error:
        _log.warning("lightning_par could not register its strategies in %s: %s", strategies.__name__, error)


class _Finder:
    """Finds nothing by itself: it lets the other finders work, and registers after the module was executed.

    It stays on ``sys.meta_path``, since `importlib.reload` makes a new, empty registry.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in HOMES:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                _register_after_exec(spec)
                return spec
        return None


def _register_after_exec(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return

    def exec_module(module: ModuleType) -> None:
        if module.__name__ != spec.name:  # a loader may serve several modules
            execute(module)
            return
        loader.__dict__.pop("exec_module", None)
        execute(module)
        _try_to_register(module)

    try:
        # On the instance, so that everything else about the loader (type, source, resources) stays as it was.
        loader.exec_module = exec_module
    except AttributeError:
        _log.warning("lightning_par can't watch %s: `import lightning_par` after it registers the names", spec.name)
