"""Torch's own optimizers, of which it is known whether they treat every element, or every parameter, by itself.

Read from their sources, not tried: a trial tells nothing of other sizes, values and steps than its own.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

BY_ELEMENT: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""A step on parts of the parameters is the step on the whole, part by part, with any options."""

BY_PARAMETER: tuple[type[Optimizer], ...] = (
    *BY_ELEMENT,
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.SparseAdam,
)
"""What a step does to a parameter depends on its own gradient and state alone."""

_BESIDE_STEPS = ("__init__", "zero_grad", "step")  # the last is looked at by itself


def runs_torchs_step(optimizer: Any, step: Any, kinds: tuple[type[Optimizer], ...]) -> bool:
    """Whether ``optimizer`` is of one of ``kinds``, and its steps run no code but torch's, hooks aside.

    Args:
        optimizer: of any class.
        step: its ``step``, as the user or a scheduler left it.
        kinds: `BY_ELEMENT` or `BY_PARAMETER`.

    Example::

        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        assert runs_torchs_step(optimizer, optimizer.step, BY_ELEMENT)
    """
    ancestors = type(optimizer).__mro__
    kind = next((cls for cls in ancestors if cls in kinds), None)
    if kind is None:
        return False
    # of the object, and of classes that derive from torch's
    for space in (vars(optimizer), *map(vars, ancestors[: ancestors.index(kind)])):
        for name, value in space.items():
            overrides = hasattr(kind, name) and (callable(value) or hasattr(value, "__get__"))
            if name not in _BESIDE_STEPS and (overrides or isinstance(value, property)):
                return False
    return _is_torchs(kind.step) and _is_torchs(step)


def _is_torchs(function: Any) -> bool:
    """Whether a function, and each that it wraps, was defined by torch; `functools.wraps` hides whose it is."""
    function = getattr(function, "__func__", function)
    while isinstance(function, FunctionType) and function.__globals__.get("__name__", "").startswith("torch."):
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False
