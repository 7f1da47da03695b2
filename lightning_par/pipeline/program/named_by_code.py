"""What the code of modules takes by name, of which nothing is watched: methods of classes, and what libraries hold.

A step may put something else there around a unit, as ``unittest.mock.patch.object(F, "gelu", ...)`` does, and take it
away again: only its own run would have the unit see that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_par.private.dict_versions import dict_behind, version_of_dict
from lightning_par.python_state.code_names import names_of
from lightning_par.python_state.found import ATOMS
from lightning_par.trial.memo import Memo

_METHODS = vars(Tensor)
_Places = list[tuple[Mapping[str, Any], str]]
_Spaces = list[tuple[Mapping[str, Any], list[str]]]


class NamedByCode:
    """What the names in the code of ``modules`` stand for.

    Example::

        named = NamedByCode([torch.nn.GELU()])
        before = named.now()
        with unittest.mock.patch.object(torch.nn.functional, "gelu", torch.relu):
            assert not are_alike(named.now(), before)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._spaces = _spaces[tuple(dict.fromkeys(map(type, modules)))]
        dicts = [space if type(space) is dict else dict_behind(space) for space, _ in self._spaces]
        self._dicts = [x for x in dicts if x is not None]
        self._counted = len(self._dicts) == len(dicts)  # by Python: most of the time their versions tell it all
        self._versions: list[int] = []
        self._found: list[Any] = []

    def now(self) -> list[Any]:
        """What is there now, in an order that stays the same; the same list where nothing was written."""
        versions = [*map(version_of_dict, self._dicts)]
        if not self._counted or versions != self._versions:
            self._versions, found = versions, list[Any]()
            for space, names in self._spaces:
                found += map(space.get, names)
            self._found = found
        return self._found


def are_alike(now: list[Any], before: list[Any]) -> bool:
    """Whether the names stand for the same; of what is neither called nor one plain value, a copy may stand in."""
    if now is before:
        return True
    if len(now) != len(before):
        return False
    return all(map(is_, now, before)) or all(map(is_, map(_compared, now), map(_compared, before)))


def _compared(x: Any) -> Any:
    return x if type(x) in ATOMS or callable(x) else None


def _spaces_of(kinds: tuple[type[nn.Module], ...]) -> _Spaces:
    found: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
    for space, name in _places_of(kinds):
        found.setdefault(id(space), (space, []))[1].append(name)
    return [*found.values()]


def _places_of(kinds: tuple[type[nn.Module], ...]) -> _Places:
    found: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
    for kind in kinds:
        own = [vars(one) for one in kind.__mro__ if one not in nn.Module.__mro__]
        found.update({(id(space), "forward"): (space, "forward") for space in own})
        _add_named([x for space in own for x in space.values() if isinstance(x, FunctionType)], found)
    return [*found.values()]


def _add_named(functions: list[FunctionType], found: dict[tuple[int, str], tuple[Mapping[str, Any], str]]) -> None:
    """Where ``functions`` find what they name: in the globals of their file, in Python modules there, on tensors."""
    for function in functions:  # and helpers beside it, which it appends
        names, space = names_of(function.__code__), function.__globals__
        found.update({(id(_METHODS), name): (_METHODS, name) for name in names.attributes if hasattr(Tensor, name)})
        modules = [sys.modules.get(name) for name in names.imports]
        for name in names.globals:
            x = space.get(name)
            found[id(space), name] = space, name
            modules.append(x)
            if isinstance(x, FunctionType) and x.__globals__ is space and x not in functions:
                functions.append(x)
        for module in modules:  # and modules of theirs, which it appends
            if isinstance(module, ModuleType):
                inner = vars(module)
                named = [name for name in names.attributes if name in inner]
                modules += [x for x in map(inner.get, named) if isinstance(x, ModuleType) and x not in modules]
                found.update({(id(inner), name): (inner, name) for name in named})


_spaces: Memo[tuple[type[nn.Module], ...], _Spaces] = Memo(_spaces_of)
