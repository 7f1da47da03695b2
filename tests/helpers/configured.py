"""A LightningModule that builds its layers in ``configure_model``, from one that builds them in ``__init__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule


def configured(build: Callable[[], LightningModule]) -> LightningModule:
    """What ``build`` makes, made in ``configure_model``.

    Example::

        module = configured(MODELS["gpt"].module)
        assert not list(module.parameters())
    """
    kind: Any = type(build())

    class Configured(kind):
        def __init__(self) -> None:
            LightningModule.__init__(self)
            self.is_built = False

        def configure_model(self) -> None:
            if not self.is_built:
                made = vars(build())
                vars(self).update({name: value for name, value in made.items() if name not in ("_trainer", "_fabric")})
                self.is_built = True

    Configured.__name__ = kind.__name__
    return Configured()
