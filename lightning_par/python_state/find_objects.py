"""Objects of certain kinds that others hold, as the random generators of a dataset."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

MAX_OBJECTS = 5000  # that are looked into; datasets can be large
MAX_ITEMS = 100  # of one list, tuple, set or dict


def find_objects(holders: Iterable[Any], kinds: tuple[type, ...]) -> list[Any]:
    """What is of ``kinds`` that ``holders`` reach through attributes, containers, partials and closures, or are.

    Example::

        assert find_objects([functools.partial(print, file=sys.stdout)], (io.IOBase,)) == [sys.stdout]
    """
    seen: set[int] = set()
    found: list[Any] = []
    waiting = list(holders)
    while waiting and len(seen) < MAX_OBJECTS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append(value)
        else:
            waiting.extend(_inside(value))
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | int | float | type | torch.Tensor | np.ndarray | None):
        return []
    if isinstance(value, list | tuple | set | frozenset):
        return [item for item, _ in zip(value, range(MAX_ITEMS))]
    if isinstance(value, dict):
        return [item for item, _ in zip(value.values(), range(MAX_ITEMS))]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.ModuleType):  # through one all others are reached
        return []
    inner: list[Any] = [_plain(value, "__self__"), _plain(value, "__func__")]
    for cell in _plain(value, "__closure__") or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    inner.extend((_plain(value, "__dict__") or {}).values())
    return inner


def _plain(value: Any, name: str) -> Any:
    """An attribute as Python keeps it: a ``__getattr__`` of a user's object may import, load or answer anything."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None
