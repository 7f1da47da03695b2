"""Which of the two Lightnings a strategy belongs to.

``lightning`` and ``pytorch_lightning`` are two copies of the same code, and their classes don't mix. Our classes are
written once, without an import of either, and find Lightning's pieces through a `Namespace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Namespace:
    """The module names of one Lightning.

    Args:
        pytorch: the package with the Trainer, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        fabric: the package below it, ``"lightning.fabric"`` or ``"lightning_fabric"``.
        ours: our own module with the strategies made for it.
    """

    pytorch: str
    fabric: str
    ours: str

    def from_pytorch(self, module: str, name: str) -> Any:
        """``name`` of the Trainer package's ``module``, e.g. ``("trainer.states", "TrainerFn")``."""
        return getattr(import_module(f"{self.pytorch}.{module}"), name)

    def from_fabric(self, module: str, name: str) -> Any:
        """``name`` of the fabric package's ``module``."""
        return getattr(import_module(f"{self.fabric}.{module}"), name)


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric", "lightning_par")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric", "lightning_par.pl")
OTHER = {LIGHTNING: PYTORCH_LIGHTNING, PYTORCH_LIGHTNING: LIGHTNING}


def namespace_of(kind: type) -> Namespace:
    """The Lightning of a LightningModule's class.

    Raises:
        TypeError: it is no such class.
    """
    for namespace in OTHER:
        if any(f"{base.__module__}.".startswith(f"{namespace.pytorch}.") for base in kind.__mro__):
            return namespace
    raise TypeError(f"module must be a LightningModule or make one, not a {kind.__name__}.")
