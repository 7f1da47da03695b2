"""Which torch functions are events of a step, and what they do: tell a value, or set a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import (
    BY_ENTRY,
    LOWERED,
    MEMORY,
    MEMORY_KINDS,
    METADATA,
    PRECISIONS,
    SHOWS,
    VALUE_PROPERTIES,
    VIEWS,
)

# Functions that read only what an absent value tells, too.
_TOLD = METADATA | MEMORY | MEMORY_KINDS | SHOWS

_DEVICE = torch.ops.prim.device.default  # by which C++ asks tensors whose class tells their device

# Functions that autocast leaves in the precision of what they are given, or runs in single.
_NEVER_LOWERED = (BY_ENTRY - {"prelu"}) | VIEWS | PRECISIONS | {
    "embedding", "embedding_bag", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm", "__get__",
}  # fmt: skip

# Functions that take of another tensor only what an absent value tells, too, written without it.
WITHOUT_ANOTHER: dict[str, Callable[[Tensor, Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "to": lambda x, like: (Tensor.to, (x,), {"dtype": like.dtype, "device": like.device}),
    "type_as": lambda x, like: (Tensor.to, (x,), {"dtype": like.dtype, "device": like.device}),
    "expand_as": lambda x, like: (Tensor.expand, (x, tuple(like.shape)), {}),
    "view_as": lambda x, like: (Tensor.view, (x, tuple(like.shape)), {}),
    "reshape_as": lambda x, like: (Tensor.reshape, (x, tuple(like.shape)), {}),
}


def is_metadata(func: Any, name: str) -> bool:
    """Whether ``func``, whose ``__name__`` is ``name``, reads only what an absent value tells, too."""
    if name == "__set__":
        return getattr(func.__self__, "__name__", "") != "data"
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in VALUE_PROPERTIES
    return name in _TOLD or func is _DEVICE


def most_casts(func: Any) -> int:
    """How often autocast may copy into low precision what ``func`` is given as one argument, 2 for more than once.

    As a recurrent layer does, which takes its weights at each place of the sequence.
    """
    name = getattr(func, "__name__", "")
    if name in _NEVER_LOWERED or is_metadata(func, name):
        return 0
    return 1 if name in LOWERED else 2


def is_setting(given: Any, result: Any) -> bool:
    """Whether a function neither took nor gave a tensor: it asks or switches a mode, and does so in every run."""
    return not tensors_in(given) and not tensors_in(result)


def is_of_data(func: Any, name: str) -> bool:
    """Whether ``func`` gets or sets the `.data` of a tensor."""
    return name in ("__get__", "__set__") and getattr(func.__self__, "__name__", "") == "data"


def sets_data(func: Any) -> bool:
    """Whether ``func`` is what runs for ``x.data = value``."""
    return getattr(func, "__name__", "") == "__set__" and is_of_data(func, "__set__")


def sets_requires_grad(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``func`` lets a parameter require a gradient that did not, or the other way round."""
    name = getattr(func, "__name__", "")
    is_setter = name == "__set__" and getattr(func.__self__, "__name__", "") == "requires_grad"
    if not (is_setter or name == "requires_grad_") or not isinstance(args[0], nn.Parameter):
        return False
    wanted = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
    return bool(wanted) != args[0].requires_grad
