"""What an event is told beside tensors, where that may decide whether samples mix."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import groupby
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.digest import digest
from lightning_par.pipeline.trial.tensor_contents import FEW
from lightning_par.private.modes import no_modes
from lightning_par.private.pytree import leaves_given
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import BY_ENTRY, INDEXES

_WORDS = (bool, str, type(None))
_NUMBERS = (int, float)
_OPAQUE = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)
_OTHERS = (
    "torch.",
    "lightning",
    "pytorch_lightning.",
    "numpy.",
)  # packages: a trial sees stand-ins, or nothing decides
_MOST = 50_000  # things that are looked at


def modes_around() -> tuple[Any, ...]:
    """What the user's code has set around a call that decides which values get a gradient, and of which dtype they are:
    whether gradients are kept, and what autocast lowers to."""
    grad, cpu, cuda = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if not (cpu or cuda):  # of each step at each event
        return (grad,)
    return grad, cpu and torch.get_autocast_dtype("cpu"), cuda and torch.get_autocast_dtype("cuda")


@contextmanager
def as_around(modes: tuple[Any, ...]) -> Iterator[None]:
    """Inside, autocast is as `modes_around` has told it."""
    with ExitStack() as stack:
        for kind, dtype in zip(("cpu", "cuda"), modes[1:]):
            stack.enter_context(torch.autocast(kind, dtype=dtype or None, enabled=bool(dtype)))
        yield


def flags_of(told: tuple[Any, ...]) -> tuple[Any, ...]:
    """The words and flags of what an event is told (`told_to`)."""
    return tuple(x for x in told if type(x) in _WORDS)


def told_to(
    func: Any, args: Any, kwargs: Any, of_model: Container[int] = (), by_numbers: bool = True
) -> tuple[Any, ...]:
    """Words and flags among the arguments of an event, and whole numbers but where each entry is by itself.

    Which of the tensors are values of the model, whose ids are in ``of_model``, is told, too, but not how many others
    there are in a row: a list may grow. Of what a unit is given all plain content counts, but for its own float
    arguments if not ``by_numbers``.
    """
    if isinstance(func, str):
        given = [x for x in (*args, *kwargs.values()) if not isinstance(x, Tensor)]
        own = given if by_numbers else [x for x in given if type(x) is not float]
        return tuple(_content([*kwargs, own])) if own or kwargs else ()
    name = getattr(func, "__name__", "")
    kinds = _WORDS if name in BY_ENTRY or name in INDEXES else (*_WORDS, int)  # what an index leaves shows in shapes
    rows = [is_model for is_model, _ in groupby([id(x) in of_model for x in tensors_in((args, kwargs))])]
    return (tuple(rows), *[x for x in leaves_given(args, kwargs) if type(x) in kinds])


def content_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What plain tensors say that a unit may decide by: few numbers, in words since NaN equals no NaN, or a hash."""
    with no_modes():
        plain = [x for x in tensors if type(x) is Tensor and not x.is_meta]  # weights may be on another rank
        return tuple(repr(x.tolist()) if x.numel() <= FEW else int(digest(x)) for x in plain)


def _content(value: Any) -> Iterator[Any]:
    """The plain values in ``value`` and in the objects that it holds, in an order that is the same each time.

    Where these are too many to be looked at, something that equals nothing: what is told is another thing each time.
    """
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST:
        x = waiting.pop()
        if type(x) in (*_WORDS, *_NUMBERS):
            yield x
        elif isinstance(x, Enum):
            yield str(x)
        elif id(x) not in seen and not isinstance(x, _OPAQUE):
            seen.add(id(x))
            waiting += reversed(_parts(x))
    if waiting:
        yield object()


def _parts(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple, deque)):
        return [*x]
    if isinstance(x, Mapping):
        return [part for pair in x.items() for part in pair]
    if f"{type(x).__module__}.".startswith(_OTHERS):
        return []
    slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()) if name != "__weakref__"]
    return [*getattr(x, "__dict__", {}).items(), *(getattr(x, name, None) for name in slots)]
