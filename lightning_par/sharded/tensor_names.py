"""What sharded tensors are called where ranks say of what they are about to talk.

A parameter has its name as long as its module has it there, and what is computed of it has it, too: outside of steps,
and in the first step of each kind. In others nothing is named, since that would take time. See
`lightning_par.mesh.handshake`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from lightning_par.private.modules import parameters_of


class TensorNames:
    """The names in one run.

    Attributes:
        on: whether tensors are named: no step runs, or the first of its kind, where sharded tensors have names.
        current: the name of the first tensor that the function that runs was given.
    """

    def __init__(self) -> None:
        self.on = False
        self.current = ""
        self._weights: dict[int, _Place] = {}  # by id, of the module's parameters

    def name_weights(self, module: nn.Module) -> None:
        """The parameters of ``module`` have their names from now on."""
        self.on = True
        self._weights.clear()
        for name, parameter in module.named_parameters():
            path, _, attribute = name.rpartition(".")
            self._weights[id(parameter)] = _Place(name, parameters_of(module.get_submodule(path)), attribute)
            if hasattr(parameter, "positions"):
                parameter._name = name  # type: ignore[attr-defined]

    def end(self) -> None:
        """Nothing is named any more."""
        self.on, self.current = False, ""
        self._weights.clear()

    def name_among(self, values: Iterable[Any]) -> str:
        """What a function of ``values`` is called: by the weight among them, or else by the first that has a name."""
        values = [*values]
        weights = (name for x in values if (name := self._weight_name(x)))
        return next(weights, "") or next(filter(None, map(self.name_of, values)), "")

    def name_of(self, value: Any) -> str:
        """The name of a tensor, or of the named ones of a list or tuple; empty if there is none."""
        if isinstance(value, (list, tuple)):
            return ", ".join(name for x in value[:50] if (name := self.name_of(x)))
        return str(getattr(value, "_name", "") or self._weight_name(value))

    def _weight_name(self, value: Any) -> str:
        place = self._weights.get(id(value))
        return place.name if place is not None and place.has(value) else ""


class _Place(NamedTuple):
    """Where a module has a parameter.

    Code may put another parameter there in the middle of a run, as what unpacks quantized weights does. Something else
    may then get the first one's id, on each rank something other. A weak reference would tell as well, but what has
    one can't be swapped.
    """

    name: str
    parameters: dict[str, nn.Parameter | None]
    attribute: str

    def has(self, value: Any) -> bool:
        return self.parameters.get(self.attribute) is value
