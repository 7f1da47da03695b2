"""What a layer that is called outside a step keeps in its attributes: user code reads these on all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter

from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS

_MISSING = object()


class UnitAttributes:
    """The attributes of the modules of a ``unit`` that are no weights, buffers or modules, as they are before a call.

    Example::

        attributes = UnitAttributes(layer)
        layer.calls += 1
        assert attributes.changed() == {("", "calls"): 1}
    """

    def __init__(self, unit: nn.Module) -> None:
        self._modules = {name: vars(module) for name, module in unit.named_modules()}
        self._before = {name: dict(held) for name, held in self._modules.items()}

    def changed(self) -> dict[tuple[str, str], Any]:
        """What the call has stored, by module and name."""
        return {
            (name, key): value
            for name, held in self._modules.items()
            for key, value in held.items()
            if value is not self._before[name].get(key, _MISSING)
            and key not in (BUFFERS, PARAMETERS, MODULES)
            and not isinstance(value, (nn.Module, Parameter))
        }

    def put(self, changed: dict[tuple[str, str], Any]) -> None:
        """Store here what the call has stored where it ran."""
        for (name, key), value in changed.items():
            self._modules[name][key] = value
