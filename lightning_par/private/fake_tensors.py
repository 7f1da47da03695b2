"""Tensors without values, which torch computes shapes with; their module has no public name.

Tensors on ``meta``, which are public, forget the device on which the real ones are.
"""

from __future__ import annotations

import logging
import types

from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "unset_fake_temporarily",
]

log = logging.getLogger(fake_tensor.__name__)
"""Where torch tells of what fakes can't run."""


def makes_fakes(frame: types.FrameType) -> bool:
    """Whether what runs there describes a tensor, with its gradient, for a fake of it, as the compiler does with all
    that a graph uses. What the user's code asks for the compiler reads in frames of its own."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch._subclasses.")
