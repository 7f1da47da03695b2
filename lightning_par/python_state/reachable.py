"""Every mutable object that a step reaches: from its module, by what its code names, through all that these hold."""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_par.private import lightning_modules, metrics
from lightning_par.private.module_hooks import HOOKS, hooks_on_all
from lightning_par.private.modules import MODULES, PARAMETERS, buffers_of, parameters_of
from lightning_par.python_state.code_names import names_of
from lightning_par.python_state.contents import CacheCell, cell_of_value
from lightning_par.python_state.iterators import IteratorCell, Replay, copied_by
from lightning_par.python_state.mutable_objects import (
    AttributesCell,
    BodyCell,
    BuffersCell,
    Cell,
    ContextCell,
    MappingCell,
    NamesCell,
    SequenceCell,
    SetCell,
    SlotsCell,
    TupleCell,
    is_dunder,
    version_of,
)
from lightning_par.python_state.user_code import has_attributes, is_library, is_users_code, slots_of

SMALL = 1 << 16  # elements of a tensor that is copied without a thought
_ITEMS = 64  # of one container whose tensors get a spare
_LOOKED_AT = 1000  # items of one container whose insides are watched
_MOST = 50_000  # objects in all
_OWN = frozenset(vars(nn.Module())) - {"training"}
_STEPS = frozenset("training_step validation_step test_step predict_step forward on_before_batch_transfer "
                   "transfer_batch_to_device on_after_batch_transfer".split())  # fmt: skip
_ANY_NAME = frozenset("getattr setattr delattr vars eval exec globals attrgetter methodcaller __dict__".split())
ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, slice,
                    range, type(...), type(NotImplemented), types.ModuleType, np.dtype, types.GetSetDescriptorType,
                    types.MemberDescriptorType))  # fmt: skip
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
                nn.InstanceNorm3d)  # fmt: skip
_BUILTINS = frozenset(vars(builtins))
_MODULES = "The step assigns modules or parameters: {places}. Make them in __init__."
_UNORDERED = "The step changes an object in a set, which has another place on each rank: {places}. Keep it in a list."
_FILE = "The step writes to a file: {places}. Write in on_train_batch_end or on_validation_batch_end."


@dataclass
class HeldTensor:
    """A tensor, and where it is; ``lends`` if a copy may stand in for it everywhere."""

    tensor: Tensor
    slots: list[tuple[Cell, Any]] = field(default_factory=list)
    lends: bool = True


@dataclass
class _Found:
    name: str
    value: Any
    cell: Cell | None = None
    key: Any = None
    fixed: str | None = None


class Reach:
    """The cells of all mutable objects, found from those that are added.

    Args:
        packages: installed packages that count as the user's.
        apart: objects that are not looked into, with their names by id.
        code: whether to look at what the code of classes and functions names, too.
        hooks: whether to look at what hooks on modules hold, too.

    Attributes:
        cells: by name.
        metrics: metrics and collections of them, by name.
        tensors: plain tensors, by id.
        met: all tensors.
        names: of every object that was met, by id.
        objects: the same objects, by name.
        classes: the user's, where their code was not looked at.

    Example::

        reach = Reach()
        reach.add("self.outputs", [{"n": 1}])
        assert list(reach.cells) == ["self.outputs", "self.outputs[0]"]
    """

    def __init__(
        self,
        packages: frozenset[str] = frozenset(),
        apart: Mapping[int, str] | None = None,
        code: bool = True,
        hooks: bool = True,
    ) -> None:
        self.packages, self.apart, self.code, self.hooks = packages, {} if apart is None else apart, code, hooks
        self.classes: list[type] = []
        self.cells: dict[str, Cell] = {}
        self.metrics: dict[str, nn.Module] = {}
        self.tensors: dict[int, HeldTensor] = {}
        self.met: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.objects: dict[str, Any] = {}
        self.of_modules: set[int] = set()  # ids of the cells of modules
        self.uncounted: set[int] = set()  # ids of tensors whose versions don't tell
        self.items_given: list[tuple[str, Tensor, int]] = []  # copies of tensors that iterators will give again
        self._holders: dict[int, TupleCell | IteratorCell] = {}
        self._waiting: deque[_Found] = deque()
        self._reached: set[str] = set(_STEPS)
        self._unreached: dict[str, list[_Found]] = {}
        self._spaces: dict[int, NamesCell] = {}
        self._met: set[int] = set()  # ids of classes

    def add(self, name: str, value: Any) -> None:
        """Look into ``value`` and all that it holds."""
        self._waiting.append(_Found(name, value))
        self._walk()

    def add_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Look into modules; their submodules are added by themselves."""
        for name, module in modules:
            self._module(name, module)
        for n, hook in enumerate(hooks_on_all() if self.hooks else ()):
            self._waiting.append(_Found(f"hook {n} of all modules", hook))
        self._walk()

    def _walk(self) -> None:
        while self._waiting:
            found = self._waiting.popleft()
            if type(found.value) not in ATOMS:
                self._visit(found)

    def _visit(self, found: _Found) -> None:
        value, key = found.value, id(found.value)
        if isinstance(value, Tensor):
            self._tensor(found)
            return
        holder = self._holders.get(key)
        if holder is not None and found.cell is not None:
            holder.holders.append((found.cell, found.key))
        if key in self.names or len(self.names) > _MOST:
            return
        if key in self.apart:
            self._name(self.apart[key], value)
            return
        look = next((f for kind, f in _BY_KIND if isinstance(value, kind)), Reach._other)
        look(self, found)

    def _name(self, name: str, value: Any) -> str:
        """The name that ``value`` has from now on: ``name``, or another one if that is taken."""
        unique, n = name, 1
        while unique in self.objects:
            n += 1
            unique = f"{name} ({n})"
        self.names[id(value)], self.objects[unique] = unique, value
        return unique

    def _keep(self, found: _Found, cell: Cell | None, insides: bool = True) -> None:
        """A cell was made of what was found: look into it."""
        if cell is None:
            return
        self.cells[cell.name] = cell
        if insides:
            self._inside(cell, found.fixed)

    def _inside(self, cell: Cell, fixed: str | None = None, buffers: bool = False) -> None:
        items = [(key, x) for key, x in cell.items() if type(x) not in ATOMS]
        if all(type(key) is str for key, _ in items):  # names that are equal on all ranks, whatever came first
            items.sort(key=operator.itemgetter(0))
        if len(items) > _ITEMS and not buffers and not isinstance(cell, (BodyCell, NamesCell)):
            for key, x in items:
                if type(x) is Tensor:
                    self._tensor(_Found(cell.place(key), x, cell, key), lends=False)
            items = [(key, x) for key, x in items if type(x) is not Tensor][:_LOOKED_AT]
        for key, x in items:
            if buffers and type(x) is Tensor:
                self._tensor(_Found(cell.place(key), x, cell, key), lends=True)
            else:
                self._waiting.append(_Found(cell.place(key), x, cell, key, fixed))

    def _tensor(self, found: _Found, lends: bool | None = None) -> None:
        x, cell = found.value, found.cell
        if id(x) not in self.names:
            self._name(found.name, x)
            self.met.append(x)
        if type(x) is not Tensor or cell is None:
            return
        held = self.tensors.setdefault(id(x), HeldTensor(x))
        held.slots.append((cell, found.key))
        small = x.numel() <= SMALL and not x.requires_grad
        held.lends &= (small if lends is None else lends) and not isinstance(cell, SetCell) and _lends(cell)

    # ------------------------------------------------------------------------------------------- modules and their code

    def _module(self, name: str, module: nn.Module) -> None:
        if id(module) in self.names:
            return
        name = self._name(name, module)
        skipped = _OWN | lightning_modules.ATTRIBUTES
        if isinstance(module, Metric) or metrics.is_collection(module):
            self.metrics[name] = module
            skipped |= metrics.ATTRIBUTES
        cell = self.cells[name] = MappingCell(name, module, vars(module), skipped)
        self._inside(cell)
        self.of_modules.add(id(cell))
        if isinstance(module, torch.jit.ScriptModule):  # what it holds is not Python's: nothing else can be put there
            self._inside(TupleCell(f"{name}._buffers", tuple(buffers_of(module).values()), None))
        else:
            self._dicts(name, module)
        for path, p in parameters_of(module).items():
            if p is not None and id(p) not in self.names:
                self._name(f"{name}.{path}", p)
        for kind in HOOKS if self.hooks else ():
            for n, hook in enumerate(vars(module)[kind].values()):
                self._waiting.append(_Found(f"{name}.{kind}[{n}]", hook))
        self._class(type(module))

    def _dicts(self, name: str, module: nn.Module) -> None:
        """What a module keeps its buffers, submodules and parameters in."""
        uncounted = isinstance(module, _BATCH_NORMS)
        buffers = (BuffersCell if uncounted else MappingCell)(f"{name}._buffers", module, buffers_of(module))
        self.cells[buffers.name] = buffers
        if uncounted:
            self.uncounted.update(map(id, buffers_of(module).values()))
        self.of_modules.add(id(buffers))
        self._inside(buffers, buffers=True)
        for fixed in (MODULES, PARAMETERS):
            self.cells[f"{name}.{fixed}"] = MappingCell(name, module, vars(module)[fixed], fixed=_MODULES)

    def _hidden_module(self, found: _Found) -> None:
        """A module that is held by something else than a module."""
        for path, module in found.value.named_modules():
            if id(module) not in self.apart:
                self._module(f"{found.name}.{path}" if path else found.name, module)

    def _class(self, kind: type) -> None:
        if id(kind) in self._met:
            return
        self._met.add(id(kind))
        for base in kind.__mro__:
            known = id(base) in self.names or id(base) in self.apart
            if known or not is_users_code(base.__module__, self.packages):
                continue
            if not self.code:
                self.classes.append(base)
                continue
            name = self._name(base.__qualname__, base)
            cell = self.cells[name] = BodyCell(name, base)
            for key, value in vars(base).items():
                functions = _functions_in(value)
                called = is_dunder(key) or _is_called_by_libraries(base, key)
                for function in functions:
                    self._method(_Found(cell.place(key), function), key, called)
                if not functions and not is_dunder(key):
                    self._waiting.append(_Found(cell.place(key), value, cell, key))

    def _method(self, found: _Found, name: str, called: bool) -> None:
        if called or name in self._reached or not self._reached.isdisjoint(_ANY_NAME):
            self._waiting.append(found)
        else:
            self._unreached.setdefault(name, []).append(found)

    def _function(self, found: _Found) -> None:
        function = found.value
        name = self._name(found.name, function)
        for variable, closed in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._waiting.append(_Found(f"{name}.{variable}", closed))
        if function.__defaults__ or function.__kwdefaults__:
            self._keep(found, AttributesCell(f"{name} (defaults)", function, ("__defaults__", "__kwdefaults__")))
        space = function.__globals__
        if not self.code or not is_users_code(space.get("__name__"), self.packages):
            return
        self._keep(found, MappingCell(name, function, vars(function)))
        names = names_of(function.__code__)
        cell = self._space(space, [n for n in names.globals if n in space or n not in _BUILTINS])
        modules = [cell.before.get(n) for n in names.globals] + [sys.modules.get(n) for n in names.imports]
        for module in modules:  # and modules of theirs, which it appends
            if isinstance(module, types.ModuleType) and is_users_code(module.__name__, self.packages):
                named = sorted(names.attributes & vars(module).keys())
                self._space(vars(module), named)
                inner = (vars(module)[n] for n in named)
                modules += [m for m in inner if isinstance(m, types.ModuleType) and m not in modules]
        self._reach(names.words - self._reached)

    def _space(self, space: dict[str, Any], names: Collection[str]) -> NamesCell:
        """Globals of a Python module: those that are named somewhere."""
        cell = self._spaces.get(id(space))
        if cell is None:
            cell = self._spaces[id(space)] = NamesCell(self._name(str(space.get("__name__")), space), space, ())
            self.cells[cell.name] = cell
        for key, value in cell.add(names):
            self._waiting.append(_Found(cell.place(key), value, cell, key))
        return cell

    def _reach(self, names: frozenset[str]) -> None:
        self._reached |= names
        flushed = self._unreached if not names.isdisjoint(_ANY_NAME) else names & self._unreached.keys()
        for name in sorted(flushed):
            self._waiting.extend(self._unreached.pop(name))

    # ------------------------------------------------------------------------------------------------- kinds of objects

    def _cached(self, found: _Found) -> None:
        name = self._name(found.name, found.value)
        self._keep(found, CacheCell(name, found.value), insides=False)
        self._waiting.append(_Found(name, getattr(found.value, "__wrapped__", None)))

    def _closed(self, found: _Found) -> None:
        self._keep(found, AttributesCell(self._name(found.name, found.value), found.value, ("cell_contents",)))

    def _context(self, found: _Found) -> None:
        self._keep(found, ContextCell(self._name(found.name, found.value), found.value))

    def _bound(self, found: _Found) -> None:
        self._waiting.append(_Found(found.name, found.value.__self__))
        self._waiting.append(_Found(found.name, getattr(found.value, "__func__", None)))

    def _partial(self, found: _Found) -> None:
        name = self._name(found.name, found.value)
        for part in ("func", "args", "keywords", "__dict__"):
            self._waiting.append(_Found(f"{name}.{part}", getattr(found.value, part)))

    def _type(self, found: _Found) -> None:
        self._class(found.value)

    def _reference(self, found: _Found) -> None:
        self._waiting.append(_Found(found.name, found.value()))

    def _mapping(self, found: _Found) -> None:
        name = self._name(found.name, found.value)
        self._keep(found, MappingCell(name, found.value, found.value, fixed=found.fixed))
        self._attributes(found, name)

    def _sequence(self, found: _Found) -> None:
        name = self._name(found.name, found.value)
        self._keep(found, SequenceCell(name, found.value, found.fixed))
        self._attributes(found, name)

    def _set(self, found: _Found) -> None:
        name = self._name(found.name, found.value)
        if isinstance(found.value, set):
            self._keep(found, SetCell(name, found.value, found.fixed), insides=False)
        for n, x in enumerate(found.value):
            self._waiting.append(_Found(f"{name}[{n}]", x, None, None, _UNORDERED))
        self._attributes(found, name)

    def _tuple(self, found: _Found) -> None:
        if all(type(x) in ATOMS for x in found.value):
            return
        cell = self._holders[id(found.value)] = TupleCell(self._name(found.name, found.value), found.value, found.fixed)
        if found.cell is not None:
            cell.holders.append((found.cell, found.key))
        self._keep(found, cell)
        self._attributes(found, cell.name)

    def _iterator(self, found: _Found) -> None:
        look = partial(self._reached_by, found.value) if isinstance(found.value, types.GeneratorType) else None
        cell = IteratorCell(self._name(found.name, found.value), found.value, found.fixed, look, self._own)
        self._holders[id(found.value)] = cell
        if found.cell is not None:
            cell.holders.append((found.cell, found.key))
        self._keep(found, cell)
        given = _within_iterator(found.value)
        items = [x for x in given if type(x) not in ATOMS and not hasattr(type(x), "__next__")]
        if items:
            self._waiting.append(_Found(f"{cell.name} (items)", items))

    def _own(self, item: Any) -> Any:
        """Of an iterator's ``item`` what the run that is on may change: what is watched, else a copy."""
        if type(item) in ATOMS:
            return item
        if isinstance(item, Tensor):
            copy = copied_by({}, item)
            if id(item) in self.tensors:
                self.items_given.append((self.names[id(item)], copy, version_of(copy)))
            return copy
        known = {id(x): x for x in self.objects.values() if not hasattr(type(x), "__next__")}
        iterators = (cell for cell in self.cells.values() if isinstance(cell, IteratorCell))
        return copied_by(known | {id(cell.replay.source): cell.replay for cell in iterators}, item)

    def _reached_by(self, generator: types.GeneratorType[Any, Any, Any]) -> Callable[[], Mapping[str, Cell]]:
        """Looks at what the code of ``generator`` has at hand where it stands now."""
        return partial(self._cells_of, {} if generator.gi_frame is None else dict(generator.gi_frame.f_locals))

    def _cells_of(self, values: Mapping[str, Any]) -> Mapping[str, Cell]:
        reach = Reach(self.packages)
        for name, value in values.items():
            reach.add(name, value)
            if isinstance(value, nn.Module):
                reach.add_modules([(f"{name}.{path}".rstrip("."), m) for path, m in value.named_modules()])
        for held in reach.tensors.values():
            for cell, key in held.slots:
                cell.watch(key, held.tensor)
        return reach.cells

    def _other(self, found: _Found) -> None:
        value = found.value
        if value is sys.stdout or value is sys.stderr:
            return
        cell = cell_of_value(self._name(found.name, value), value, found.fixed)
        if cell is not None:
            if callable(getattr(value, "writable", None)) and not hasattr(value, "getvalue") and value.writable():
                cell.fixed = _FILE
            self._keep(found, cell)
            if isinstance(value, np.ndarray) and value.dtype.hasobject:
                for n, x in enumerate(value.flat):
                    self._waiting.append(_Found(f"{cell.name}.flat[{n}]", x))
        elif _is_iterator(value):
            del self.objects[self.names.pop(id(value))]
            self._iterator(found)
        elif has_attributes(value):
            self._attributes(found, self.names[id(value)])

    def _attributes(self, found: _Found, name: str) -> None:
        """The attributes of an object, beside what it may hold as a container."""
        value, kind = found.value, type(found.value)
        if kind.__module__ == "builtins" or not has_attributes(value):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            inner = f"{name}.__dict__" if name in self.cells else name
            self._keep(found, MappingCell(inner, value, attributes, fixed=found.fixed))
        slots = slots_of(kind)
        if slots:
            cell = SlotsCell(f"{name}.__slots__" if name in self.cells else name, value, slots)
            cell.fixed = found.fixed
            self._keep(found, cell)
        self._class(kind)


def _lends(cell: Cell) -> bool:
    """Whether something else can be put where the cell holds a tensor."""
    return not isinstance(cell, TupleCell) or bool(cell.holders) and all(_lends(holder) for holder, _ in cell.holders)


def _functions_in(value: Any) -> list[Any]:
    """The functions of a method, property or the like in a class body."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [x for x in (value.fget, value.fset, value.fdel) if x is not None]
    if isinstance(value, (functools.cached_property, functools.partialmethod)):
        return [value.func]
    return [value] if isinstance(value, types.FunctionType) else []


def _is_called_by_libraries(kind: type, name: str) -> bool:
    """Whether a method takes the place of one that a library knows, other than those that Lightning calls by hand."""
    return any(
        is_library(base.__module__)
        and not base.__module__.startswith(("lightning", "pytorch_lightning", "torch.nn.modules.module", "builtins"))
        and name in vars(base)
        for base in kind.__mro__
    )


def _within_iterator(value: Any) -> list[Any]:
    """What an iterator of Python's own has to give, where it is at hand; not what it keeps that in, as that changes."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) is Replay:
            waiting += [one.source, [given.item for given in one.given]]
        elif type(one).__module__ in ("builtins", "itertools") and hasattr(type(one), "__next__"):
            if not isinstance(one, types.GeneratorType):
                waiting += gc.get_referents(one)
        elif type(one) is tuple and any(hasattr(type(x), "__next__") for x in one):  # of what it takes from
            waiting += one
        elif type(one) in (list, tuple, deque) and len(one) <= _LOOKED_AT:
            found += one
    return found


def _is_iterator(value: Any) -> bool:
    """Whether ``value`` gives items that it can't be made to give again."""
    step = getattr(type(value), "__next__", None)
    return step is not None and not (isinstance(step, types.FunctionType) and not is_library(step.__module__))


_BY_KIND: tuple[tuple[Any, Callable[[Reach, _Found], None]], ...] = (
    (nn.Module, Reach._hidden_module),
    (types.FunctionType, Reach._function),
    ((types.MethodType, types.BuiltinMethodType), Reach._bound),
    (type(functools.lru_cache(print)), Reach._cached),
    (functools.partial, Reach._partial),
    (type, Reach._type),
    (types.CellType, Reach._closed),
    (contextvars.ContextVar, Reach._context),
    (weakref.ref, Reach._reference),
    (dict, Reach._mapping),
    ((list, deque), Reach._sequence),
    ((set, frozenset), Reach._set),
    (tuple, Reach._tuple),
)
