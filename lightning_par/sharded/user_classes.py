"""Classes of tensors that users wrote, as ``class MyParam(nn.Parameter)``: a parameter's in whatever form it is.

A tensor without memory that stands for one of such a class is of a class that begins with its own way and goes on with
the user's, so that ``isinstance``, methods and attributes are the user's. A sharded one remembers it, and says so to
user code: to rules its very class counts.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable
from inspect import getattr_static
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_par.private.tensors import is_marked
from lightning_par.sharded.who_reads import is_inner
from lightning_par.trial.memo import Memo

_CLASS = vars(object)["__class__"]
_PLAIN = (Tensor, nn.Parameter)

_OF_TENSORS = ("__torch_function__", "__deepcopy__", "__reduce_ex__", "__repr__")
"""What parameters have otherwise than tensors of a class that has memory of its own way."""

_WHEN_MADE = {
    *(
        "__new__",
        "__init__",
        "__init_subclass__",
        "__class_getitem__",
        "__subclasshook__",
        "__setstate__",
        "__reduce__",
    ),
    *("__repr__", "__str__", "__format__", "__dir__", "__hash__", "__deepcopy__", "__reduce_ex__"),
}
"""What a class may have for itself that no value goes by once parameters of it are there."""

REMEMBERED = "_users_class"
"""The attribute of a tensor, or of its class where that is ours, that holds the user's class."""


def users_class(x: Tensor) -> Any:
    """The class that the user gave ``x``, or what it stands for; None where that is torch's own."""
    kind = vars(x).get(REMEMBERED) or getattr(type(x), REMEMBERED, type(x))
    return kind if kind is not None and is_users(kind) else None


def is_users(kind: type) -> bool:
    """Whether ``kind`` is a user's class of tensors with memory of their own."""
    own_way = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return kind not in _PLAIN and not own_way and not issubclass(kind, (UninitializedParameter, UninitializedBuffer))


def of_users_class(x: Tensor, name: str) -> Any:
    """The attribute ``name`` of the user's class that ``x`` remembers, as a tensor of it has it.

    Raises:
        AttributeError: it has none, or there is no such class.
    """
    kind = vars(x).get(REMEMBERED)
    for base in () if kind is None else kind.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, x, kind)
    raise AttributeError(f"{(kind or type(x)).__name__!r} object has no attribute {name!r}", name=name, obj=x)


def own_ways(kind: type) -> list[str]:
    """What of ``kind`` runs where torch's own is asked for, or where an attribute is set."""
    own = kind.__mro__[: kind.__mro__.index(nn.Parameter if issubclass(kind, nn.Parameter) else Tensor)]
    found = {name: value for base in reversed(own) for name, value in vars(base).items() if name not in _WHEN_MADE}
    return [name for name, value in found.items() if _is_own_way(name, value)]


def _is_own_way(name: str, value: Any) -> bool:
    if name.startswith("__"):  # what Python keeps in classes, as `__doc__`, is none
        runs = callable(value) or isinstance(value, (classmethod, staticmethod, property))
        is_torchs = name == "__torch_function__" and value is nn.Parameter.__torch_function__
        return runs and not is_torchs and (hasattr(Tensor, name) or name == "__getattr__")
    is_set = value.fset is not None if isinstance(value, property) else hasattr(type(value), "__set__")
    return is_set or hasattr(Tensor, name)


def with_own_ways(module: nn.Module) -> dict[str, str]:
    """The parameters of ``module``, by their first names, that can't be in parts for what their class overrides, and
    what each is."""
    kinds = {name: users_class(x) for name, x in module.named_parameters()}
    ways = {name: own_ways(kind) for name, kind in kinds.items() if kind is not None}
    return {name: f"a {kinds[name].__name__}, which has its own {own[0]}" for name, own in ways.items() if own}


def _check_adds_alone(kind: type) -> None:
    """Sharded tensors have what ``kind`` adds to torch's, and what both have as torch has it."""
    ways = own_ways(kind)
    if ways:
        raise NotImplementedError(
            f"A parameter of the class {kind.__name__} is to be split over ranks, and {kind.__name__}.{ways[0]} has a "
            "way of its own for what torch's has, too, or for an attribute that is set: a part of it would go on as "
            "torch's. Make it a method of another name, or a function."
        )


def set_class(x: Tensor, kind: Any) -> None:
    """``x.__class__ = kind``, unseen by `KeepsClass`."""
    _CLASS.__set__(x, kind)


def set_classes(tensors: Iterable[Tensor], kinds: Iterable[Any]) -> None:
    """`set_class` of many."""
    deque(map(_CLASS.__set__, tensors, kinds), maxlen=0)


def put_on(x: Tensor, kind: Any) -> Tensor:
    """Let ``x`` be of the user's class ``kind`` beside its own, if it is not None, or remember it; ``x`` again.

    Raises:
        NotImplementedError: ``x`` is sharded, and ``kind`` has own ways of what torch has.
    """
    if kind is not None:
        if hasattr(x, "_local"):  # to sharded tensors' rules their very class counts
            _check_adds_alone(kind)
            vars(x)[REMEMBERED] = kind
        else:
            set_class(x, kind if type(x) in _PLAIN else worn(type(x), kind))
    return x


def worn(way: type, kind: type) -> Any:
    """The subclass of ``way``, a class of ours, that is of the user's class ``kind``, too."""
    return _worn[way, kind] if is_users(kind) else way


def joined(way: type, kind: type, content: dict[str, Any]) -> Any:
    """A subclass of ``kind`` that begins with ``way``, and has this ``content``."""
    content = {**content, "__module__": kind.__module__}
    return types.new_class(kind.__name__, (way, kind), {}, lambda space: space.update(content))


def _make_worn(classes: tuple[type, type]) -> Any:
    way, kind = classes
    return joined(way, kind, {REMEMBERED: kind, **{name: getattr_static(way, name) for name in _OF_TENSORS}})


_worn = Memo(_make_worn)


class KeepsClass:
    """``x.__class__`` is the user's to user code, to which it can be set: what ``x`` is beside stays."""

    def _recast(self, kind: type) -> None:
        """The user gives it the class ``kind``."""
        raise NotImplementedError

    def _read(self) -> Any:
        x: Any = self  # no `isinstance` here, which would ask again
        if _asks_inner(sys._getframe(1)):
            return type(x)
        is_parameter = is_marked(x) or issubclass(type(x), nn.Parameter)
        return users_class(x) or (nn.Parameter if is_parameter else Tensor)

    def _write(self, kind: Any) -> None:
        if _asks_inner(sys._getframe(1)):
            set_class(self, kind)  # type: ignore[arg-type]
        else:
            self._recast(kind)

    __class__ = property(_read, _write)  # type: ignore[assignment]


def _asks_inner(frame: types.FrameType) -> bool:
    if frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None:  # of parameters' classes
        frame = frame.f_back
    return is_inner(frame)
