"""Finds private names of torch and Lightning in Python sources, by how they are written: no code is run.

What an object is can't be seen there. So a private name is one of ours if one of our files defines it, and a stray if
none does; and of those that both have, it is a stray on everything but an object of a class of ours.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.sources import parsing

PACKAGES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")
OURS = "lightning_par"
OF_PYTHON = frozenset("_asdict _exit _field_defaults _fields _getframe _make _replace".split())
"""What Python documents: of named tuples, `os` and `sys`."""

_NAME = re.compile(r"_(?!_)\w*[^\W\d_]\w*")
_PATH = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)*\._(?!_)\w+(\.\w+)*")
_ASKED = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}
_OF_DICTS = {"get", "pop", "setdefault"}
_OWN = {"self", "cls"}


@dataclass(frozen=True)
class Known:
    """Names that begin with one underscore.

    Args:
        ours: those that our files define.
        theirs: attributes of objects and modules of torch and Lightning.
        kept: those of ``theirs`` that objects keep in their ``__dict__``, which are met as strings, too.
        inherited: by the name of a class of ours, ``module.Class``, what it has of classes of torch and Lightning.
    """

    ours: Collection[str] = ()
    theirs: Collection[str] = ()
    kept: Collection[str] = ()
    inherited: Mapping[str, Collection[str]] = field(default_factory=dict)


def is_private(name: Any) -> bool:
    """Whether ``name`` begins with one underscore, as a convention for what is not public."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def defined(tree: ast.AST) -> set[str]:
    """The private names that a file makes: functions, classes, variables, arguments, fields, attributes it sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Call) and _asks_dict(node) and node.func.attr == "setdefault":
            found.update(x.value for x in node.args[:1] if isinstance(x, ast.Constant))
    return set(filter(is_private, found))


def strays(tree: ast.AST, known: Known, module: str = "") -> list[tuple[int, str]]:
    """The lines with private names that are not of ours, and these, in the file of ``module``."""
    return sorted(set(_Finder(known, module).of(tree)))


@functools.cache
def attributes_of(kind: type) -> frozenset[str]:
    """The private names that objects of ``kind`` have, also those that its methods set."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    found = {*vars(kind), *(_set_by(file).get(kind.__name__, ()) if file.endswith(".py") else ())}
    return frozenset(filter(is_private, found)).union(*map(attributes_of, kind.__bases__))


@functools.cache
def _set_by(file: str) -> dict[str, set[str]]:
    """By the name of a class in ``file``, the attributes of ``self`` that it has to do with."""
    found: dict[str, set[str]] = {}
    with parsing():
        tree = ast.parse(Path(file).read_text())
    for kind in [x for x in ast.walk(tree) if isinstance(x, ast.ClassDef)]:
        nodes = [*ast.walk(kind)]
        names = {x.attr for x in nodes if isinstance(x, ast.Attribute) and _is_own(x.value)}
        names |= {x.value for x in nodes if isinstance(x, ast.Constant) and is_private(x.value)}  # of `__setattr__`
        found.setdefault(kind.name, set()).update(names)
    return found


class _Finder:
    def __init__(self, known: Known, module: str) -> None:
        self._known, self._path = known, [module]
        self._inherited: Collection[str] = ()
        self._asked: set[ast.AST] = set()  # strings by which an object was asked, and parts of strings
        self._modules: set[str] = set()  # of ours

    def of(self, node: ast.AST) -> Iterator[tuple[int, str]]:
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in self._names(node))
        if not isinstance(node, ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                yield from self.of(child)
            return
        before, self._path = (self._path, self._inherited), [*self._path, node.name]
        self._inherited = {*self._inherited, *self._known.inherited.get(".".join(self._path), ())}
        yield from ((line, name) for name in sorted(_members(node) & set(self._inherited)))
        for child in ast.iter_child_nodes(node):
            yield from self.of(child)
        self._path, self._inherited = before

    def _names(self, node: ast.AST) -> Iterable[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names if _PATH.fullmatch(alias.name)]
        if isinstance(node, ast.JoinedStr):
            self._asked.update(node.values)
        if isinstance(node, ast.ImportFrom):
            if node.level or f"{node.module}".partition(".")[0] == OURS:
                self._modules.update(alias.asname or alias.name for alias in node.names)
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            return [path for path in paths if not node.level and _PATH.fullmatch(path)]
        if isinstance(node, ast.Attribute):
            return [node.attr] if self._is_stray(node.value, node.attr) else []
        if isinstance(node, ast.Call):
            return self._by_string(node)
        if isinstance(node, ast.Subscript) and _is_dict_of_attributes(node.value):
            return self._of(_owner(node.value), [node.slice])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = () if node in self._asked else node.value.split()
            return [x for x in words if x in self._known.kept or _PATH.fullmatch(x)]
        return []

    def _by_string(self, call: ast.Call) -> list[str]:
        """The names that a call has as strings."""
        function = call.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in ("attrgetter", "methodcaller"):
            return self._of(None, call.args)
        if name in _ASKED and call.args:
            return self._of(call.args[0], call.args[1:2])
        if _asks_dict(call):
            return self._of(_owner(function.value), call.args[:1])
        return []

    def _of(self, owner: ast.AST | None, names: Iterable[ast.AST]) -> list[str]:
        texts = [x for x in names if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        self._asked.update(texts)
        return [name for x in texts for name in x.value.split(".") if self._is_stray(owner, name)]

    def _is_stray(self, owner: ast.AST | None, name: str) -> bool:
        if not is_private(name) or name in OF_PYTHON:
            return False
        if name not in self._known.ours:
            return True
        if isinstance(owner, ast.Name) and owner.id in self._modules:
            return False
        return name in (self._inherited if _is_own(owner) else self._known.theirs)


def _members(kind: ast.ClassDef) -> set[str]:
    """The private names that a class defines in its body."""
    found = [node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in kind.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [target.id for target in targets if isinstance(target, ast.Name)]
    return set(filter(is_private, found))


def _is_own(owner: ast.AST | None) -> bool:
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in _OWN


def _asks_dict(call: ast.Call) -> bool:
    """Whether it is a call of a method of ``vars(x)`` or ``x.__dict__`` with a name."""
    function = call.func
    return isinstance(function, ast.Attribute) and function.attr in _OF_DICTS and _is_dict_of_attributes(function.value)


def _is_dict_of_attributes(node: ast.AST) -> bool:
    """Whether it is ``vars(x)`` or ``x.__dict__``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def _owner(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Attribute):
        return node.value
    return node.args[0] if isinstance(node, ast.Call) and node.args else None
