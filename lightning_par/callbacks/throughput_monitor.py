"""What Lightning's ``ThroughputMonitor`` counts: each sample once, though all ranks of a replica see it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.private.trainer import throughputs
from lightning_par.strategies.namespace import Namespace


def count_samples_once(callbacks: Iterable[Any], replica: Axis, namespace: Namespace) -> None:
    """Let monitors divide what a replica does a second among its devices.

    Each rank counts the batch of its replica as its own, and Lightning multiplies by the number of ranks. To be called
    in each run, after `Callback.setup`.
    """
    kind = namespace.from_pytorch("callbacks", "ThroughputMonitor")
    for callback in callbacks:
        for throughput in throughputs(callback) if isinstance(callback, kind) else ():
            throughput.compute = partial(_compute, throughput, replica.size)


def _compute(throughput: Any, sharers: int) -> dict[str, int | float]:
    """``throughput.compute()`` where ``sharers`` devices have done it together."""
    counted: dict[str, int | float] = type(throughput).compute(throughput)
    rates = ("_per_sec", f"{throughput.separator}mfu")
    return {name: value / sharers if name.endswith(rates) else value for name, value in counted.items()}
