"""Hooks that a run of a step registers or removes: on modules, on parameters, on the calls of all modules.

Each rank has made its own hooks, by its own run of the step's code, with the handles that remove them: they do not
travel, a rank goes on with those that it has made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, MutableMapping
from itertools import compress
from typing import Any, NoReturn

from torch import nn

from lightning_par.private.leaf_hooks import hooked, hooks_of, set_hooks
from lightning_par.private.module_hooks import dicts_of_hooks, handles_made, hang, users_hooks
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.changes import MappingChange

_Dicts = tuple[MutableMapping[int, Any], ...]  # of one module, by kind: hooks by the ids of their handles
_Held = tuple[dict[int, Any], ...]  # what of it is the user's


Removed = dict[str, tuple[tuple[int, ...], ...]]
"""By the name of a holder, and by kind, the places of hooks among those that hung there."""


class Hung:
    """The user's hooks on one module or parameter, for the rank alone that has made them.

    Args:
        dicts: where they hang.
        held: what of each dict is the user's.
    """

    def __init__(self, dicts: _Dicts, held: _Held) -> None:
        self.dicts, self.held = dicts, held

    def __reduce__(self) -> NoReturn:
        raise TypeError("it is a hook that goes by values of the model, or that other ranks do not make")


class HookHolders:
    """Where hooks hang that a step meets: on the modules within ``module``, on its ``weights``, and on all modules."""

    def __init__(self, module: nn.Module | None = None, weights: bool = True) -> None:
        self.modules = {"all modules": dicts_of_hooks(None)}
        self.parameters: dict[str, nn.Parameter] = {}
        if module is None:
            return
        self.modules |= {f"self.{name}" if name else "self": dicts_of_hooks(m) for name, m in module.named_modules()}
        self.parameters = {f"parameter {name}": p for name, p in module.named_parameters() if weights}


class HooksCell(Cell):
    """The user's hooks on all modules and parameters.

    Args:
        holders: where they may hang.

    Example::

        hooks = HooksCell(Holders(module))
        module.register_forward_hook(print)
        hooks.restore()
        assert not module._forward_hooks
    """

    NAME = "the hooks on modules"
    before: dict[str, _Held]

    def __init__(self, holders: HookHolders) -> None:
        super().__init__(self.NAME, self)
        self._modules, self._parameters = holders.modules, holders.parameters
        self._note()

    def _dicts(self, name: str) -> _Dicts:
        if name in self._modules:
            return self._modules[name]
        return hooks_of(self._parameters[name])

    def _now(self) -> dict[str, _Held]:
        """What is the user's, where anything is."""
        dicts = dict(compress(self._modules.items(), map(any, self._modules.values())))
        dicts |= {name: hooks_of(p) for name, p in hooked(self._parameters.items())}
        held = {name: users_hooks(found) for name, found in dicts.items()}
        return {name: found for name, found in held.items() if any(found)}

    def _note(self) -> None:
        self.before, self._handles = self._now(), handles_made()

    def moved(self) -> bool:
        if handles_made() == self._handles:  # at most something was removed
            before = self.before.items()
            return bool(before) and any(users_hooks(self._dicts(name)) != held for name, held in before)
        if self._now() != self.before:
            return True
        self._handles = handles_made()
        return False

    def renew(self, atoms: Collection[Any]) -> bool:
        if self.moved():
            self._note()
        return True

    def change(self) -> MappingChange | None:
        if not self.moved():
            return None
        now = self._now()
        changed = [name for name in {**self.before, **now} if now.get(name) != self.before.get(name)]
        return MappingChange(
            {name: Hung(d, users_hooks(d)) for name, d in ((name, self._dicts(name)) for name in changed)}
        )

    def restore(self) -> None:
        if not self.moved():
            return
        for name in {**self.before, **self._now()}:
            dicts = self._dicts(name)
            hang(dicts, self.before.get(name, ({},) * len(dicts)))

    def apply(self, change: MappingChange) -> None:
        for name, hung in change.entries.items():
            hang(hung.dicts, hung.held)
            if name in self._parameters:
                set_hooks(self._parameters[name], hung.dicts)

    def removed(self) -> Removed:
        """What hung before and no longer does, by its place: each rank has handles of its own."""
        found: Removed = {}
        for name, before in self.before.items() if self.moved() else ():
            now = users_hooks(self._dicts(name))
            gone = tuple(tuple(n for n, key in enumerate(b) if key not in a) for b, a in zip(before, now, strict=True))
            if any(gone):
                found[name] = gone
        return found

    def remove(self, removed: Removed) -> None:
        """As another rank has done, where the same hung before."""
        for name, gone in removed.items():
            dicts = self._dicts(name)
            for hooks, before, places in zip(dicts, self.before.get(name, ()), gone):
                for place, key in enumerate(before):
                    if place in places:
                        hooks.pop(key, None)

    @contextlib.contextmanager
    def within_unit(self, path: str, cut: bool = False) -> Iterator[None]:
        """What is registered and removed inside is the business of the layer ``path`` that runs, which is not undone.

        Args:
            path: the layer.
            cut: whether it runs one microbatch of several.

        Raises:
            RuntimeError: a hook was registered and left, which the other ranks would not have; or one was removed,
                which ran for a part of the batch alone.
        """
        start = self._now() if self.moved() else self.before
        count = handles_made()
        yield
        if handles_made() == count and all(users_hooks(self._dicts(n)) == x for n, x in start.items()):
            return
        now = self._now()
        for name in {**start, **now}:
            was, held = start.get(name), now.get(name)
            if held is not None and any(a.keys() - b.keys() for a, b in zip(held, was or ({},) * len(held))):
                raise RuntimeError(
                    f"A hook on {name} is registered as {path!r} runs, on the rank of its stage alone. Register it "
                    "before, as in on_fit_start or __init__."
                )
            if was != held and cut:
                raise RuntimeError(
                    f"A hook on {name} is removed as {path!r} runs on a microbatch, and those after it would run "
                    "without it. Write microbatches=1."
                )
            if was != held:
                self.before.pop(name, None)
                self.before |= {name: held} if held is not None else {}
