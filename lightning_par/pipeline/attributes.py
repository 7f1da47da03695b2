"""What may lead the code within units another way than the batch does: plain values on its modules, and the trainer's.

A step that is cut into microbatches was found to treat each sample by itself. What it does outside units is checked at
every step; within units it may begin to mix samples when someone sets a flag, or at some epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

_ATOMS = (bool, int, float, str, type(None))
_INNER = ("torch.", "lightning_par.", "builtins")


class Attributes:
    """Plain values on the modules of units, their classes and configurations, as user code sets them between steps.

    What a unit sets itself does not count: other ranks would not know.

    Args:
        module: the LightningModule.
        units: the FQNs of its units.

    Example::

        attributes = Attributes(module, ["net"])
        module.net.warm = True
        assert attributes.changed_since(()) == (("net.warm", True),)
    """

    def __init__(self, module: nn.Module, units: Collection[str]) -> None:
        self._holders = dict(_holders(module, units))
        self._before = {name: dict(values) for name, values in self._holders.items()}
        self._changed: dict[str, Any] = {}
        self._of_classes: set[str] = set()  # whose numbers can't be watched in a trial run

    def changed_since(self, deciding: Collection[str]) -> tuple[tuple[str, Any], ...]:
        """What was set between two steps since the run began; numbers that are no counts only if ``deciding``."""
        for holder, values in self._holders.items():
            before = self._before[holder]
            if len(values) == len(before) and all(map(is_, values.values(), before.values())):
                continue
            for name, value in values.items():
                if isinstance(value, _ATOMS) and (name not in before or before[name] != value):
                    self._changed[f"{holder}.{name}"] = value
                    if not isinstance(values, dict):
                        self._of_classes.add(f"{holder}.{name}")
            self._before[holder] = dict(values)
        return tuple(
            (name, value)
            for name, value in self._changed.items()
            if type(value) is not float or name in deciding or name in self._of_classes
        )

    def settle(self) -> None:
        """A step has run: what it set is known."""
        for holder, values in self._holders.items():
            before = self._before[holder]
            if len(values) != len(before) or not all(map(is_, values.values(), before.values())):
                self._before[holder] = dict(values)


class Number(float):
    """A number on a module in a trial run, which notes in ``noted`` that something was decided by it."""

    name = ""
    noted: Any = None

    def _decides(self) -> None:
        if self.noted is not None:
            self.noted.add(self.name)


def _deciding(name: str) -> Any:
    def method(self: Number, *others: Any) -> Any:
        self._decides()
        return getattr(float, name)(self, *others)

    return method


for _name in ("lt le gt ge eq ne bool int floor ceil round").split():
    setattr(Number, f"__{_name}__", _deciding(f"__{_name}__"))
Number.__hash__ = float.__hash__  # type: ignore[method-assign]


def watch_numbers(copy: nn.Module, units: Collection[str], noted: set[str]) -> None:
    """Let the numbers on the units of ``copy`` note in ``noted``, by name, that something is decided by them."""
    for holder, values in _holders(copy, units):
        for name, value in list(values.items()):
            if not isinstance(values, dict):
                break
            if type(value) is float:
                number = Number(value)
                number.name, number.noted = f"{holder}.{name}", noted
                values[name] = number


def _holders(module: nn.Module, units: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The namespaces of users' modules within units, of their classes, and of plain objects that they hold."""
    seen: set[int] = set()
    for unit in units:
        for path, child in module.get_submodule(unit).named_modules(prefix=unit):
            if type(child).__module__.startswith(_INNER) or id(child) in seen:
                continue
            seen.add(id(child))
            yield path, vars(child)
            for kind in type(child).__mro__:
                if not kind.__module__.startswith(_INNER) and id(kind) not in seen:
                    seen.add(id(kind))
                    yield f"{kind.__module__}.{kind.__qualname__}", vars(kind)
            for name, value in vars(child).items():
                plain = hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type))
                if plain and not callable(value) and not name.startswith("_") and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{path}.{name}", vars(value)
