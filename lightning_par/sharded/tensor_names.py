"""What sharded tensors are called where ranks say of what they are about to talk.

A parameter has its name, and what is computed of it has it, too: outside of steps, and in the first step of each
kind. In others nothing is named, since that would take time. See `lightning_par.mesh.handshake`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

on = False
"""Whether tensors are named: no step runs, or the first of its kind, in a process where sharded tensors have names."""
current = ""
"""The name of the first tensor that the function that runs was given."""


_weights: dict[int, str] = {}  # by id, of the module's parameters


def name_weights(module: nn.Module) -> None:
    """The parameters of ``module`` have their names from now on."""
    global on
    on = True
    _weights.clear()
    for name, parameter in module.named_parameters():
        _weights[id(parameter)] = name
        if hasattr(parameter, "positions"):
            parameter._name = name  # type: ignore[attr-defined]


def end() -> None:
    """The run has ended."""
    global on, current
    on, current = False, ""
    _weights.clear()


def name_among(values: Iterable[Any]) -> str:
    """What a function of ``values`` is called: by the weight among them, or else by the first that has a name."""
    values = [*values]
    weights = (name for x in values if (name := _weights.get(id(x))))
    return next(weights, "") or next(filter(None, map(name_of, values)), "")


def name_of(value: Any) -> str:
    """The name of a tensor, or of the named ones of a list or tuple; empty if there is none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(name for x in value[:50] if (name := name_of(x)))
    return str(getattr(value, "_name", "") or _weights.get(id(value), ""))
