"""Every mutable object that a step reaches: from its module, by what its code names, through all that these hold."""

from __future__ import annotations

import builtins
import operator
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private import lightning_modules, metrics
from lightning_par.private.module_hooks import HOOKS, hooks_on_all
from lightning_par.private.modules import MODULES, PARAMETERS, buffers_of, parameters_of
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.iterators import IteratorCell
from lightning_par.python_state.cells.mappings import BATCH_NORMS, BodyCell, BuffersCell, MappingCell, is_dunder
from lightning_par.python_state.cells.names import AttributesCell, NamesCell
from lightning_par.python_state.cells.sequences import TupleCell
from lightning_par.python_state.code_names import functions_in, names_of
from lightning_par.python_state.contents import MethodCacheCell
from lightning_par.python_state.found import ATOMS, LOOKED_AT, Found, HeldTensor
from lightning_par.python_state.lent_tensors import is_small, lends_in, may_lend
from lightning_par.python_state.long_containers import LongContainers
from lightning_par.python_state.method_caches import caches_of
from lightning_par.python_state.object_kinds import look_into, may_change
from lightning_par.python_state.reached_words import ANY_NAME, ReachedWords
from lightning_par.python_state.user_code import is_called_by_libraries, is_users_code

_OWN = frozenset(vars(nn.Module())) - {"training"}
_SPOKEN = frozenset("log log_dict print".split())  # a run of a step puts others there
_BUILTINS = frozenset(vars(builtins))
_MODULES = (
    "The step assigns modules or parameters: {places}. Make them in __init__, and write into them. Of a weight keep a "
    "copy: `p.detach().clone()`."
)


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
        long: containers with many items.
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
        self.buffers: set[int] = set()  # of those of their buffers
        self.uncounted: set[int] = set()  # ids of tensors whose versions don't tell
        self.items_given: list[tuple[str, Tensor, int]] = []  # copies of tensors that iterators will give again
        self.holders: dict[int, TupleCell | IteratorCell] = {}
        self._waiting: deque[Found] = deque()
        self.long = LongContainers(ANY_NAME)
        self._words = ReachedWords()
        self._spaces: dict[int, NamesCell] = {}
        self._met: set[int] = set()  # ids of classes
        self._searched: set[int] = set()  # those of libraries' classes

    @property
    def words(self) -> Set[str]:
        """The names of attributes in the code that was looked at."""
        return self._words.reached

    def add(self, name: str, value: Any) -> None:
        """Look into ``value`` and all that it holds."""
        self.wait(name, value)
        self._walk()

    def add_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Look into modules; their submodules are added by themselves."""
        for name, module in modules:
            self.look_at_module(name, module)
        for n, hook in enumerate(hooks_on_all() if self.hooks else ()):
            self.wait(f"hook {n} of all modules", hook)
        self._walk()

    def wait(
        self, name: str, value: Any, cell: Cell | None = None, key: Any = None, fixed: str | None = None,
        many: bool = False,
    ) -> None:  # fmt: skip
        """Look into ``value`` later, after what was met before it."""
        self._waiting.append(Found(name, value, cell, key, fixed, many))

    def _walk(self) -> None:
        while self._waiting:
            found = self._waiting.popleft()
            if type(found.value) not in ATOMS:
                self._visit(found)
            if not self._waiting:
                self._waiting.extend(self.long.named_by(self._words.said))

    def _visit(self, found: Found) -> None:
        value, key = found.value, id(found.value)
        if found.many and self.long.takes(self, found):
            return
        if isinstance(value, Tensor):
            self.tensor(found)
            return
        holder = self.holders.get(key)
        if holder is not None and found.cell is not None:
            holder.holders.append((found.cell, found.key))
        if key in self.names or self.long.is_beyond(found, len(self.names)):
            return
        if key in self.apart:
            self.name(self.apart[key], value)
            return
        look_into(self, found)

    def name(self, name: str, value: Any) -> str:
        """The name that ``value`` has from now on: ``name``, or another one if that is taken."""
        unique, n = name, 1
        while unique in self.objects:
            n += 1
            unique = f"{name} ({n})"
        self.names[id(value)], self.objects[unique] = unique, value
        return unique

    def keep(self, found: Found, cell: Cell | None, insides: bool = True) -> None:
        """A cell was made of what was found: look into it."""
        if cell is None:
            return
        self.cells[cell.name] = cell
        if insides:
            self.inside(cell, found.fixed, many=found.many)

    def inside(self, cell: Cell, fixed: str | None = None, buffers: bool = False, many: bool = False) -> None:
        items = [(key, x) for key, x in cell.items() if type(x) not in ATOMS]
        if all(type(key) is str for key, _ in items):  # names that are equal on all ranks, whatever came first
            items.sort(key=operator.itemgetter(0))
        if buffers:
            self.buffers.add(id(cell))
        if many:
            self._waiting.extend(Found(cell.place(key), x, cell, key, fixed, many) for key, x in items if may_change(x))
            return
        lends = lends_in(cell, len(items), id(cell) in self.buffers)
        if lends is False:
            for key, x in items:
                if type(x) is Tensor:
                    self.tensor(Found(cell.place(key), x, cell, key), lends)
            items = [(key, x) for key, x in items if type(x) is not Tensor]
            self.long.keep(cell, items[LOOKED_AT:], fixed)
            del items[LOOKED_AT:]
        for key, x in items:
            if lends and type(x) is Tensor:
                self.tensor(Found(cell.place(key), x, cell, key), lends)
            else:
                self.wait(cell.place(key), x, cell, key, fixed)

    def tensor(self, found: Found, lends: bool | None = None) -> None:
        x, cell = found.value, found.cell
        if id(x) not in self.names:
            self.name(found.name, x)
            self.met.append(x)
        if type(x) is not Tensor or cell is None:
            return
        held = self.tensors.setdefault(id(x), HeldTensor(x))
        held.slots.append((cell, found.key))
        held.lends &= (is_small(x) if lends is None else lends) and may_lend(cell)

    # ------------------------------------------------------------------------------------------- modules and their code

    def look_at_module(self, name: str, module: nn.Module) -> None:
        """Look at what a module holds, but for its submodules, and at what its code names."""
        if id(module) in self.names:
            return
        name = self.name(name, module)
        skipped = _OWN | lightning_modules.ATTRIBUTES
        if metrics.is_metric(module):
            self.metrics[name] = module
            skipped |= metrics.ATTRIBUTES
        passing = () if lightning_modules.trainer_of(module) is None else _SPOKEN
        cell = self.cells[name] = MappingCell(name, module, vars(module), skipped.union(passing), passing=passing)
        self.inside(cell)
        self.of_modules.add(id(cell))
        if isinstance(module, torch.jit.ScriptModule):  # what it holds is not Python's: nothing else can be put there
            self.inside(TupleCell(f"{name}._buffers", tuple(buffers_of(module).values()), None))
        else:
            self._dicts(name, module)
        for path, p in parameters_of(module).items():
            if p is not None and id(p) not in self.names:
                self.name(f"{name}.{path}", p)
        for kind in HOOKS if self.hooks else ():
            for n, hook in enumerate(vars(module)[kind].values()):
                self.wait(f"{name}.{kind}[{n}]", hook)
        self.look_at_class(type(module))

    def _dicts(self, name: str, module: nn.Module) -> None:
        """What a module keeps its buffers, submodules and parameters in."""
        uncounted = isinstance(module, BATCH_NORMS)
        buffers = (BuffersCell if uncounted else MappingCell)(f"{name}._buffers", module, buffers_of(module))
        self.cells[buffers.name] = buffers
        if uncounted:
            self.uncounted.update(map(id, buffers_of(module).values()))
        self.of_modules.add(id(buffers))
        self.inside(buffers, buffers=True)
        for fixed in (MODULES, PARAMETERS):
            self.cells[f"{name}.{fixed}"] = MappingCell(name, module, vars(module)[fixed], fixed=_MODULES)

    def look_at_class(self, kind: type) -> None:
        """Look at what the user's classes among ``kind`` and its bases assign and name."""
        if id(kind) in self._met:
            return
        self._met.add(id(kind))
        for base in kind.__mro__:
            known = id(base) in self.names or id(base) in self.apart
            if known or not is_users_code(base.__module__, self.packages):
                for key, cache in () if known or id(base) in self._searched else caches_of(base):
                    if id(cache) not in self.names:
                        name = self.name(f"{base.__qualname__}.{key}", cache)
                        self.keep(Found(name, cache), MethodCacheCell(name, cache), insides=False)
                self._searched.add(id(base))
                continue
            if not self.code:
                self.classes.append(base)
                continue
            name = self.name(base.__qualname__, base)
            cell = self.cells[name] = BodyCell(name, base)
            for key, value in vars(base).items():
                functions = functions_in(value)
                called = is_dunder(key) or is_called_by_libraries(base, key)
                for function in functions:
                    self._method(Found(cell.place(key), function), key, called)
                if not functions and not is_dunder(key):
                    self.wait(cell.place(key), value, cell, key)

    def _method(self, found: Found, name: str, called: bool) -> None:
        if called or self._words.names(name):
            self._waiting.append(found)
        else:
            self._words.wait(name, found)

    def look_at_function(self, found: Found) -> None:
        """Look at what a function closes over, has as defaults, and names."""
        function = found.value
        name = self.name(found.name, function)
        for variable, closed in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self.wait(f"{name}.{variable}", closed)
        if function.__defaults__ or function.__kwdefaults__:
            self.keep(found, AttributesCell(f"{name} (defaults)", function, ("__defaults__", "__kwdefaults__")))
        space = function.__globals__
        if not self.code or not is_users_code(space.get("__name__"), self.packages):
            return
        self.keep(found, MappingCell(name, function, vars(function)))
        names = names_of(function.__code__)
        cell = self._space(space, [n for n in names.globals if n in space or n not in _BUILTINS])
        modules = [cell.before.get(n) for n in names.globals] + [sys.modules.get(n) for n in names.imports]
        for module in modules:  # and modules of theirs, which it appends
            if isinstance(module, types.ModuleType) and is_users_code(module.__name__, self.packages):
                named = sorted(names.attributes & vars(module).keys())
                self._space(vars(module), named)
                inner = (vars(module)[n] for n in named)
                modules += [m for m in inner if isinstance(m, types.ModuleType) and m not in modules]
        self._waiting.extend(self._words.add(names.words, makes=function.__name__ == "__init__"))

    def _space(self, space: dict[str, Any], names: Collection[str]) -> NamesCell:
        """Globals of a Python module: those that are named somewhere."""
        cell = self._spaces.get(id(space))
        if cell is None:
            cell = self._spaces[id(space)] = NamesCell(self.name(str(space.get("__name__")), space), space, ())
            self.cells[cell.name] = cell
        for key, value in cell.add(names):
            self.wait(cell.place(key), value, cell, key)
        return cell
