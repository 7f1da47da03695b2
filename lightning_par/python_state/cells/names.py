"""Single names: of a namespace, of slots, of a closure or a function, of a context."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Collection, Sequence
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from lightning_par.python_state.cells.mappings import NOTHING, MappingCell


class NamesCell(MappingCell):
    """Some names in a namespace: globals of a Python module, slots of an object, the variable of a closure."""

    mapping: Any

    def __init__(self, name: str, owner: Any, names: Collection[str]) -> None:
        self.names = dict.fromkeys(names)
        super().__init__(name, owner, {})
        self.before = self._now()

    @property
    def before(self) -> dict[Any, Any]:  # type: ignore[override]
        return self._before

    @before.setter
    def before(self, held: dict[Any, Any]) -> None:
        self._before = held
        self.values = [held.get(name, NOTHING) for name in self.names]

    def counted(self) -> dict[Any, Any] | None:
        return self.owner if type(self.owner) is dict else None

    def add(self, names: Collection[str]) -> list[tuple[str, Any]]:
        """Watch more names; the new ones with their values."""
        new = [name for name in names if name not in self.names]
        for name in new:
            self.names[name] = None
            self.values.append(value := self._get(name))
            if value is not NOTHING:
                self.before[name] = value
        return [(name, self.before[name]) for name in new if name in self.before]

    def _get(self, name: str) -> Any:
        return self.owner.get(name, NOTHING)

    def _put(self, key: Any, value: Any) -> None:
        self.owner[key] = value

    def _delete(self, key: Any) -> None:
        del self.owner[key]

    def _now(self) -> dict[Any, Any]:
        found = ((name, self._get(name)) for name in self.names)
        return {name: value for name, value in found if value is not NOTHING}

    def moved(self) -> bool:
        return not all(map(is_, map(self._get, self.names), self.values))

    def keep(self, key: Any, value: Any, instead: Sequence[Any]) -> None:
        super().keep(key, value, instead)
        self.before = self.before


class PublicCell(NamesCell):
    """The attributes of a module, but for those that its class keeps for itself, as weak references to weights."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module, [key for key in vars(module) if not key.startswith("_")])
        self.mapping = vars(module)

    def counted(self) -> dict[str, Any]:
        return vars(self.owner)

    def _get(self, name: str) -> Any:
        return vars(self.owner).get(name, NOTHING)

    def _put(self, key: Any, value: Any) -> None:
        vars(self.owner)[key] = value

    def _delete(self, key: Any) -> None:
        del vars(self.owner)[key]


class SlotsCell(NamesCell):
    """The ``__slots__`` of an object, through the descriptors in its classes."""

    def __init__(self, name: str, owner: Any, slots: dict[str, types.MemberDescriptorType]) -> None:
        self.slots = slots
        super().__init__(name, owner, slots)

    def _get(self, name: str) -> Any:
        try:
            return self.slots[name].__get__(self.owner)
        except AttributeError:
            return NOTHING

    def _put(self, key: Any, value: Any) -> None:
        self.slots[key].__set__(self.owner, value)

    def _delete(self, key: Any) -> None:
        self.slots[key].__delete__(self.owner)


class AttributesCell(NamesCell):
    """Attributes by which Python lets a function or a closure's variable be changed."""

    def _get(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except (AttributeError, ValueError):  # a closure's variable that is not set yet
            return NOTHING

    def moved(self) -> bool:
        try:  # in C: it is asked around each module of a step
            now = map(getattr, repeat(self.owner), self.names, repeat(NOTHING))
            return not all(map(is_, now, self.values))
        except ValueError:
            return super().moved()

    def _put(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)

    def _delete(self, key: Any) -> None:
        delattr(self.owner, key)


class ContextCell(NamesCell):
    """A `contextvars.ContextVar` in this thread's context. One can't be left without a value again, so that one that
    has neither value nor default may not change."""

    _UNSET = "The step sets a ContextVar that has no value and no default: {places}. Give it a default."

    def __init__(self, name: str, owner: contextvars.ContextVar[Any]) -> None:
        super().__init__(name, owner, ("value",))
        if not self.before:
            self.fixed = self._UNSET

    def _get(self, name: str) -> Any:
        try:
            return self.owner.get()
        except LookupError:
            return NOTHING

    def _put(self, key: Any, value: Any) -> None:
        self.owner.set(value)

    def _delete(self, key: Any) -> None:
        """Nothing: the run ends with what `fixed` says."""
