"""What an object holds of others, as Python's garbage collector sees it: whatever it is made of."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

_MOST = 10_000  # objects that are looked at


def holds(value: Any, is_meant: Callable[[Any], bool], known: Collection[int] = ()) -> bool:
    """Whether ``value`` is or holds something that ``is_meant``, or too much to be looked at.

    Args:
        value: any object.
        is_meant: asked of each object.
        known: ids of objects that need not be looked into.

    Example::

        assert holds({"a": iter([1.5])}, lambda x: isinstance(x, float))
    """
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _MOST:
        one = waiting.pop()
        if is_meant(one):
            return True
        for inner in _inside(one):
            if id(inner) not in seen and id(inner) not in known:
                seen.add(id(inner))
                waiting.append(inner)
    return bool(waiting)


def all_tensors_in(value: Any, known: Collection[int] = ()) -> list[Tensor]:
    """The tensors in ``value``, whatever holds them there, as far as it can be looked at.

    Args:
        value: any object.
        known: ids of objects that need not be looked into.

    Example::

        assert len(all_tensors_in([SimpleNamespace(x=torch.ones(1))])) == 1
    """
    found: list[Tensor] = []

    def note(x: Any) -> bool:
        if isinstance(x, Tensor):
            found.append(x)
        return False

    holds(value, note, known)
    return found


def atoms_in(value: Any) -> list[Any] | None:
    """The numbers, strings, classes and code in ``value``, as they are met; None if it holds too much.

    Example::

        assert atoms_in({"a": [1.5]}) == ["a", 1.5]
    """
    found: list[Any] = []

    def note(x: Any) -> bool:
        if isinstance(x, (bool, int, float, complex, str, bytes, type, types.ModuleType, types.CodeType)):
            found.append(x)
        elif isinstance(x, types.FunctionType):
            found.append(x.__code__)
        elif isinstance(x, types.BuiltinFunctionType):
            found.append(x.__name__)
        return False

    return None if holds(value, note) else found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (types.ModuleType, types.CodeType, types.FrameType, Tensor)):
        return []
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, type):
        return [] if "<locals>" not in value.__qualname__ else [*vars(value).values()]
    if isinstance(value, dict) and "__builtins__" in value:
        return []
    return gc.get_referents(value)
