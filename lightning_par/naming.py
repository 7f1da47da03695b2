"""What sharded tensors are called outside of steps, where ranks say of what they are about to talk.

A parameter has its name, and what is computed of it there has it, too. Within steps nothing is named.
"""

from __future__ import annotations

from typing import Any

from torch import nn

outside = False
"""Whether no step runs, in a process where sharded tensors have names."""
current = ""
"""The name of the first tensor that the function that runs was given."""


def name_weights(module: nn.Module) -> None:
    """The sharded parameters of ``module`` have their names, and a run goes on outside of steps."""
    global outside
    outside = True
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "positions"):
            parameter._name = name  # type: ignore[attr-defined]


def end() -> None:
    """The run has ended."""
    global outside, current
    outside, current = False, ""


def name_of(value: Any) -> str:
    """The name of a tensor, or of the first named one of a list or tuple; empty if there is none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(name for x in value[:50] if (name := name_of(x)))
    return str(getattr(value, "_name", ""))
