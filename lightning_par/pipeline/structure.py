"""Tensors within any structure that user code passes around: containers, dataclasses, registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Size, Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_map

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Size)  # pytree would make a tuple of a size


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function(x)`` for every tensor ``x`` in it; what holds no tensor is returned as it is.

    Goes into lists, tuples, dicts and other mappings, dataclasses and nodes registered with
    ``torch.utils._pytree`` (the outputs of ``transformers`` are). Other objects are left alone.

    Example::

        assert map_tensors(lambda x: x + 1, {"a": [torch.zeros(())]})["a"][0] == 1
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    kind = type(value)
    if kind in (list, tuple):
        new = [map_tensors(function, x) for x in value]
        return _unless_same(value, new, kind)
    if kind in (dict, OrderedDict):
        items = {key: map_tensors(function, x) for key, x in value.items()}
        return value if all(items[key] is value[key] for key in items) else kind(items)
    if kind in SUPPORTED_NODES:
        return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        new = [map_tensors(function, x) for x in value]
        return _unless_same(value, new, lambda items: kind(*items))
    if isinstance(value, defaultdict):
        return value
    if isinstance(value, Mapping):
        return _mapping(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(function, value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in the order in which `map_tensors` meets them."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(note, value)
    return found


def twin(value: Any, function: Callable[[Tensor], Any] | None = None) -> Any:
    """``value`` in objects of its own, however deep, with ``function(x)`` for every tensor ``x``; modules are shared.

    Example::

        given = {"a": torch.zeros(())}
        assert twin(given) is not given and twin(given)["a"] is given["a"]
    """
    return _twin(value, function or _same, {})


def _same(x: Tensor) -> Tensor:
    return x


def _twin(value: Any, tensor: Callable[[Tensor], Any], made: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return tensor(value)
    if id(value) in made:
        return made[id(value)]
    new: Any
    kind = type(value)
    if kind in (list, set):
        made[id(value)] = new = kind()
        (new.extend if kind is list else new.update)(_twin(x, tensor, made) for x in value)
    elif kind is tuple:
        new = tuple(_twin(x, tensor, made) for x in value)
    elif kind in (dict, OrderedDict):
        made[id(value)] = new = kind()
        new.update((key, _twin(x, tensor, made)) for key, x in value.items())
    elif kind in SUPPORTED_NODES:
        new = tree_map(lambda x: _twin(x, tensor, made), value)
    elif not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module)) or callable(value):
        new = map_tensors(tensor, value)
    else:
        made[id(value)] = new = copy.copy(value)
        for key, x in vars(value).items():
            object.__setattr__(new, key, _twin(x, tensor, made))
        new = map_tensors(tensor, new) if isinstance(new, (dict, tuple)) else new
    made[id(value)] = new
    return new


def _unless_same(old: Any, new: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    return old if all(a is b for a, b in zip(old, new, strict=True)) else make(new)


def _mapping(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A mapping of the user's own, such as a ``BatchEncoding``: copied, then changed."""
    new = {key: map_tensors(function, x) for key, x in value.items()}
    if all(new[key] is value[key] for key in new):
        return value
    copied = copy.copy(value)
    if getattr(copied, "data", None) is getattr(value, "data", value) and isinstance(
        getattr(value, "data", None), dict
    ):
        copied.data = dict(value.data)  # a UserDict's copy may share its items
    for key, x in new.items():
        copied[key] = x
    return copied


def _dataclass(function: Callable[[Tensor], Any], value: Any) -> Any:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    new = {name: map_tensors(function, x) for name, x in fields.items()}
    if all(new[name] is fields[name] for name in new):
        return value
    copied = copy.copy(value)
    for name, x in new.items():
        object.__setattr__(copied, name, x)
    return copied
