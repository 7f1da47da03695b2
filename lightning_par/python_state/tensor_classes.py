"""Tensors of a class of a user's, or of another library, as torchvision's `tv_tensors.Image`, that are no parameters.

What is made of one is of its class only where that says so of the function; its copies and its samples are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.tensors import as_class


def class_of(x: Tensor) -> type | None:
    """The class of ``x``, None where that is torch's or ours, or ``x`` a parameter.

    Example::

        assert class_of(torch.ones(2)) is None
    """
    kind = type(x)
    if kind is Tensor or kind.__module__.partition(".")[0] in ("torch", "lightning_par"):
        return None
    return None if isinstance(x, (FakeTensor, nn.Parameter)) else kind  # what stands for a parameter is of its class


def plain(x: Tensor) -> Tensor:
    """``x``, or what is the same to torch and of no class of its own."""
    return x if class_of(x) is None else as_class(x, Tensor)


def of_its_class(x: Tensor, made: Tensor) -> Tensor:
    """What was ``made`` of ``x`` in the class of that, with its attributes."""
    kind = class_of(x)
    return made if kind is None else with_attributes(as_class(made, kind), x)


def with_attributes(made: Any, x: Tensor) -> Any:
    """``made`` with the attributes of ``x``."""
    vars(made).update(vars(x))
    return made
