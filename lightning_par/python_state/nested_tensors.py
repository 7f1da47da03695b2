"""Tensors within any structure that user code passes around: containers, dataclasses, registered pytree nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Size, Tensor, nn

from lightning_par.private.pytree import SUPPORTED_NODES, tree_map
from lightning_par.python_state.tensor_classes import of_its_class, plain
from lightning_par.python_state.user_code import has_attributes, slots_of

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Size)  # pytree would make a tuple of a size
_CONTAINERS = frozenset((tuple, list, dict))


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
        return tree_map(lambda x: map_tensors(function, x), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        new = [map_tensors(function, x) for x in value]
        return _unless_same(value, new, lambda items: _named(value, items))
    if isinstance(value, list):
        new = [map_tensors(function, x) for x in list.__iter__(value)]
        return _unless_same([*list.__iter__(value)], new, lambda items: _listed(value, items))
    if isinstance(value, Mapping):
        return _mapping(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(function, value)
    return value


def cloned(x: Tensor) -> Tensor:
    """A leaf with the values of ``x``, which requires a gradient if ``x`` does."""
    copy = of_its_class(x, plain(x).detach().clone())
    if x.requires_grad:
        copy.requires_grad_()
    return copy


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in the order in which `map_tensors` meets them."""
    found: list[Tensor] = []
    if isinstance(value, Tensor):
        found.append(value)
    elif type(value) in _CONTAINERS:
        _find(value, found)
    else:
        found += _met(map_tensors, value)
    return found


def _find(container: Any, found: list[Tensor]) -> None:
    """Add the tensors in a tuple, list or dict to ``found``: of each event's arguments, in every step, so that nothing
    is called for what is no container."""
    for x in container.values() if type(container) is dict else container:
        kind = type(x)
        if isinstance(x, Tensor):
            found.append(x)
        elif kind in _CONTAINERS:
            if x:
                _find(x, found)
        elif kind not in _PLAIN:
            found += _met(map_tensors, x)


def twin(value: Any, function: Callable[[Tensor], Any] | None = None) -> Any:
    """``value`` in objects of its own, however deep, with ``function(x)`` for every tensor ``x``; modules are shared.

    Example::

        given = {"a": torch.zeros(())}
        assert twin(given) is not given and twin(given)["a"] is given["a"]
    """
    return _twin(value, function or _same, {})


def returned_tensors(value: Any) -> list[Tensor]:
    """The tensors in what a function or a module returned: in objects, too, such as a ``torch.distributions.Normal``.

    Example::

        assert len(returned_tensors((torch.distributions.Normal(torch.zeros(2), torch.ones(2)),))) == 2
    """
    if isinstance(value, Tensor):
        return [value]
    shallow, deep = tensors_in(value), _tensors_within(value)
    return shallow if len(shallow) == len(deep) else deep


def map_returned(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function(x)`` for each of its `returned_tensors`, in their order."""
    if isinstance(value, Tensor):
        return function(value)
    deep = len(_tensors_within(value)) != len(tensors_in(value))
    return twin(value, function) if deep else map_tensors(function, value)


def _met(walk: Callable[[Callable[[Tensor], Tensor], Any], Any], value: Any) -> list[Tensor]:
    """The tensors in ``value`` to which ``walk`` comes."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    walk(note, value)
    return found


def _tensors_within(value: Any) -> list[Tensor]:
    return _met(lambda note, x: twin(x, note), value)


def _same(x: Tensor) -> Tensor:
    return x


def _twin(value: Any, tensor: Callable[[Tensor], Any], made: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, _PLAIN):
        return value
    if id(value) in made:
        return made[id(value)]
    new: Any
    kind = type(value)
    if kind is set:
        new = set(value)  # of tensors it has no order that ranks share
    elif kind is tuple:
        new = tuple(_twin(x, tensor, made) for x in value)
    elif kind in SUPPORTED_NODES and kind not in (list, dict, OrderedDict):
        new = tree_map(lambda x: _twin(x, tensor, made), value)
    elif isinstance(value, tuple):  # by no constructor of the user's
        new = tuple.__new__(kind, [_twin(x, tensor, made) for x in value])
        _twin_attributes(value, new, tensor, made)
    elif isinstance(value, (list, dict)):
        made[id(value)] = new = _emptied(value)
        _twin_items(value, new, tensor, made)
        _twin_attributes(value, new, tensor, made)
    elif is_plain_object(value):
        made[id(value)] = new = copy.copy(value)
        if new is not value:  # as of a trainer, which is to be read only
            _twin_attributes(value, new, tensor, made)
    else:
        new = map_tensors(tensor, value)
    made[id(value)] = new
    return new


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` is nothing but what its attributes hold, and no module."""
    if isinstance(value, (type, nn.Module)):
        return False
    return has_attributes(value) or hasattr(value, "__dict__") and not callable(value)


def _emptied(value: Any) -> Any:
    """A list or dict of the class of ``value``, by no constructor of the user's."""
    base = next(base for base in (OrderedDict, defaultdict, dict, list) if isinstance(value, base))
    new = base.__new__(type(value))
    if isinstance(value, defaultdict):
        new.default_factory = value.default_factory
    return new


def _twin_items(value: Any, new: Any, tensor: Callable[[Tensor], Any], made: dict[int, Any]) -> None:
    if isinstance(value, list):
        list.__setitem__(new, slice(None), [_twin(x, tensor, made) for x in list.__iter__(value)])
        return
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    for key in base.__iter__(value):
        base.__setitem__(new, key, _twin(dict.__getitem__(value, key), tensor, made))


def _twin_attributes(value: Any, new: Any, tensor: Callable[[Tensor], Any], made: dict[int, Any]) -> None:
    own = getattr(new, "__dict__", None)
    if getattr(value, "__dict__", None) is value:  # a dict whose items are its attributes
        new.__dict__ = new
    elif isinstance(own, dict):
        own.update((key, _twin(x, tensor, made)) for key, x in vars(value).items())
    for name, slot in slots_of(type(value)).items():
        if hasattr(value, name):
            slot.__set__(new, _twin(slot.__get__(value), tensor, made))


def _unless_same(old: Any, new: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    return old if all(a is b for a, b in zip(old, new, strict=True)) else make(new)


def _named(value: Any, items: list[Any]) -> Any:
    """A named tuple of the class of ``value``, by no constructor of the user's."""
    return _with_attributes(value, tuple.__new__(type(value), items))


def _listed(value: list[Any], items: list[Any]) -> Any:
    """A list of the class of ``value``, by no constructor of the user's."""
    new = _emptied(value)
    list.extend(new, items)
    return _with_attributes(value, new)


def _with_attributes(value: Any, new: Any) -> Any:
    """``new``, which is empty but for its items, with the attributes of ``value``."""
    if getattr(value, "__dict__", None) is value:  # a dict whose items are its attributes
        new.__dict__ = new
    elif hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _mapping(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A mapping of the user's own, such as a ``BatchEncoding``: copied, then changed."""
    new = {key: map_tensors(function, x) for key, x in value.items()}
    if all(new[key] is value[key] for key in new):
        return value
    if isinstance(value, dict):
        copied = _emptied(value)
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        for key, x in new.items():
            base.__setitem__(copied, key, x)
        return _with_attributes(value, copied)
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
