"""`Trainer.num_devices`, which Lightning takes from no property of the strategy that could tell who asks."""

from __future__ import annotations

from typing import Any

from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.strategies.device_counts import devices_of
from lightning_par.strategies.namespace import Namespace


def patch(namespace: Namespace) -> Replacement:
    """Of that property."""
    return Replacement(namespace.from_pytorch("trainer", "Trainer"), "num_devices", _counted)


def _counted(plain: Any, use: Use) -> Any:
    def num_devices(self: Any) -> int:
        devices = devices_of(self) if use.on else None
        return int(plain.fget(self)) if devices is None else devices

    return property(num_devices, doc=plain.__doc__)
