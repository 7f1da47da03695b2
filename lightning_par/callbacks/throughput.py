"""What Lightning's ``ThroughputMonitor`` counts: each sample once, though all ranks of a replica see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.private.trainer import throughputs
from lightning_par.strategies.namespace import Namespace


def count_samples_once(callbacks: Iterable[Any], data: Axis, replica: Axis, namespace: Namespace) -> None:
    """Let monitors take a replica for a device, with the FLOPs per second of all its devices.

    Each rank counts the batch of its replica as its own, and Lightning multiplies by the number of ranks. To be called
    once a run, after `Callback.setup`.
    """
    kind = namespace.from_pytorch("callbacks", "ThroughputMonitor")
    for callback in callbacks:
        for throughput in throughputs(callback) if isinstance(callback, kind) else ():
            throughput.world_size = data.size
            if throughput.available_flops is not None:
                throughput.available_flops *= replica.size
