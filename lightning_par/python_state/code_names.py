"""What code names: the globals, attributes and modules by which a function reaches state that it was not given."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_par.trial.memo import Memo

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")


@dataclass(frozen=True)
class Names:
    """What a function names, the functions within it included.

    Attributes:
        globals: names in the globals of its Python module.
        attributes: names behind a dot, and words among its strings, which `getattr` may be given.
        imports: Python modules that it imports.
        words: all names of globals and attributes.
    """

    globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[str, ...]
    words: frozenset[str]


_known: Memo[int, tuple[types.CodeType, Names]] = Memo()  # by id, since code is compared by what it holds


def names_of(code: types.CodeType) -> Names:
    """What ``code`` names."""
    found = _known.get(id(code))
    if found is None or found[0] is not code:
        found = _known[id(code)] = code, _read(code)
    return found[1]


def _read(code: types.CodeType) -> Names:
    named, attributes, imports = dict[str, None](), set[str](), dict[str, None]()
    for one in _all(code):
        for line in dis.get_instructions(one):
            if line.opname in _GLOBALS:
                named[line.argval] = None
            elif line.opname in _ATTRIBUTES:
                attributes.add(line.argval)
            elif line.opname == "IMPORT_NAME":
                imports[line.argval] = None
        attributes.update(x for x in one.co_consts if isinstance(x, str) and x.isidentifier())
    return Names(tuple(named), frozenset(attributes), tuple(imports), frozenset(attributes.union(named)))


def _all(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _all(x)


def functions_in(value: Any) -> list[types.FunctionType]:
    """The functions of a method, property or the like in a class body, as far as they are Python's: a
    ``staticmethod(len)`` has none."""
    found = [value]
    if isinstance(value, (staticmethod, classmethod)):
        found = [value.__func__]
    elif isinstance(value, property):
        found = [value.fget, value.fset, value.fdel]
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        found = [value.func]
    return [x for x in found if isinstance(x, types.FunctionType)]
