"""Model parallelism for PyTorch Lightning by one Trainer argument.

Example::

    Trainer(strategy="tensor_parallel", devices=4)
    Trainer(strategy=lightning_par.TensorParallelStrategy(tensor_parallel_size=2), devices=4)
    Trainer(strategy=lightning_par.PipelineParallelStrategy(schedule="zbv"), devices=4)
    Trainer(strategy=lightning_par.LayerPlacementStrategy({"encoder": 0, "decoder": 1}), devices=2)
    Trainer(strategy=lightning_par.SequenceParallelStrategy(attention="ring"), devices=4)
    Trainer(strategy=lightning_par.HybridParallelStrategy(pipeline_parallel_size=2, tensor_parallel_size=2), devices=4)

The classes here belong to ``lightning.pytorch``; those in `lightning_par.pl` to ``pytorch_lightning``. Nothing heavy is
imported before a name is used, since ``import torch`` imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_par.strategies import registry

if TYPE_CHECKING:
    from lightning_par.dry import dry_run
    from lightning_par.mesh.layout import Layout
    from lightning_par.mesh.ledger import ledger
    from lightning_par.planner import plan
    from lightning_par.strategies.lightning import (
        AutoParallelStrategy,
        HybridParallelStrategy,
        LayerPlacementStrategy,
        ParallelTrace,
        PipelineParallelStrategy,
        ReplicaGuard,
        ScheduleTrace,
        SequenceParallelStrategy,
        TensorParallelStrategy,
        Throughput,
    )
    from lightning_par.verdict import check

__version__ = "0.1.0"
__all__ = [
    "AutoParallelStrategy",
    "HybridParallelStrategy",
    "LayerPlacementStrategy",
    "Layout",
    "ParallelTrace",
    "PipelineParallelStrategy",
    "ReplicaGuard",
    "ScheduleTrace",
    "SequenceParallelStrategy",
    "TensorParallelStrategy",
    "Throughput",
    "check",
    "dry_run",
    "ledger",
    "plan",
]

_HOME = {
    "AutoParallelStrategy": "lightning_par.strategies.lightning",
    "HybridParallelStrategy": "lightning_par.strategies.lightning",
    "LayerPlacementStrategy": "lightning_par.strategies.lightning",
    "Layout": "lightning_par.mesh.layout",
    "ParallelTrace": "lightning_par.strategies.lightning",
    "PipelineParallelStrategy": "lightning_par.strategies.lightning",
    "ReplicaGuard": "lightning_par.strategies.lightning",
    "ScheduleTrace": "lightning_par.strategies.lightning",
    "SequenceParallelStrategy": "lightning_par.strategies.lightning",
    "TensorParallelStrategy": "lightning_par.strategies.lightning",
    "Throughput": "lightning_par.strategies.lightning",
    "check": "lightning_par.verdict",
    "dry_run": "lightning_par.dry",
    "ledger": "lightning_par.mesh.ledger",
    "plan": "lightning_par.planner",
}

registry.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_par' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
