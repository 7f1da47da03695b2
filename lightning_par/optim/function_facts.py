"""What is known of a torch function that an optimizer calls: whether it may run on parts, or reads its arguments only.

A function that is not listed may do anything: hand out views, write, or take the address of its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lightning_par.private.operators import HOMES
from lightning_par.sharded.functions import (
    ARRAYS,
    BY_ENTRY,
    FUSED,
    LISTS,
    MAKES_NEW,
    METADATA,
    NEW,
    PRECISIONS,
    READS,
    STRIDES,
    VIEWS,
    name_of,
    writes_into,
)
from lightning_par.trial.memo import Memo


class Effect(Enum):
    """What a function does with tensors that it is given."""

    METADATA = auto()
    """Reads no values: a shape, a dtype."""
    BY_ELEMENT = auto()
    """Makes each entry, or writes it, of the same entries of its arguments."""
    LISTS = auto()
    """As `BY_ELEMENT`, for each tensor of a list by itself."""
    NEW = auto()
    """Reads the dtype and device alone."""
    READS = auto()
    """Makes new tensors, and changes nothing; their shapes follow from the arguments' shapes."""
    NUMBER = auto()
    """Makes a number for Python, and changes nothing."""
    VIEWS = auto()
    """May return the same memory."""
    OTHER = auto()


@dataclass(frozen=True)
class Function:
    """A torch function.

    Args:
        name: what the user calls it.
        kind: what it does.
        writes: whether it writes into its first argument.
    """

    name: str
    kind: Effect
    writes: bool


_KINDS = (
    (METADATA | STRIDES | {"requires_grad_"}, Effect.METADATA),
    (BY_ENTRY | PRECISIONS | {"copy_", "contiguous", "detach", "detach_"}, Effect.BY_ELEMENT),
    (NEW, Effect.NEW),
    (LISTS | FUSED, Effect.LISTS),
    (MAKES_NEW, Effect.READS),
    (READS - ARRAYS, Effect.NUMBER),
    (VIEWS, Effect.VIEWS),
)


def function_of(func: Any) -> Function:
    """What is known of ``func``, as a `torch.overrides.TorchFunctionMode` is given it.

    Example::

        assert function_of(torch.Tensor.add_) == Function("add_", Kind.BY_ELEMENT, True)
    """
    return _known[func]


def _function_of(func: Any) -> Function:
    name = name_of(func)
    return Function(name, _kind(func, name), writes_into(name))


_known = Memo(_function_of)


def _kind(func: Any, name: str) -> Effect:
    module = getattr(func, "__module__", None) or "torch"
    if getattr(func, "__name__", "") == "__get__":
        return Effect.VIEWS if name in VIEWS else Effect.OTHER if name == "_base" else Effect.METADATA
    if module.startswith((*HOMES, "torch.fft", "torch.special")) or not module.startswith("torch"):
        return Effect.OTHER
    return next((kind for names, kind in _KINDS if name in names), Effect.OTHER)
