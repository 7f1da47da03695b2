"""The effects of a step that ran once for each microbatch, as if it had run once."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from lightning_par.pipeline.effects.console import Said, SayingCall
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.python_state.nested_tensors import is_plain_object
from lightning_par.python_state.referents import holds
from lightning_par.python_state.user_code import slots_of


def merged(effects: Sequence[Effects], join: Callable[[list[Any]], Any]) -> Effects:
    """The effects of a step that ran once for each microbatch, as if it had run once.

    Args:
        effects: one for each microbatch, of the same structure.
        join: given the tensors at the same place, one for each microbatch, returns the whole one.

    Returns:
        The whole; what is no tensor is the last microbatch's.

    Example::

        runs = [Effects(result=torch.full((1,), float(i))) for i in range(3)]
        assert merged(runs, torch.cat).result.tolist() == [0.0, 1.0, 2.0]
    """
    names = {key: name for x in effects for key, name in x.names.items()}
    joined = _Joined(join, names)
    whole = {
        name: joined.of([getattr(x, name) for x in effects])
        for name in ("logs", "state", "places", "refused", "raised", "result")
    }
    said = _said([x.said for x in effects], joined)
    return Effects(**whole, names=names, kept=[x.kept for x in effects], said=said)


def _said(parts: Sequence[list[Said]], joined: _Joined) -> list[Said]:
    """What loggers are given is joined; of the texts, which a library may say once alone, those of who said most."""
    calls = iter(joined.of([[x for x in part if isinstance(x, SayingCall)] for part in parts]))
    return [next(calls) if isinstance(x, SayingCall) else x for x in max(parts, key=len)]


class _Joined:
    """Puts values together, of which each microbatch has its own, in objects of the last one's kinds.

    Args:
        join: the tensors at the same place.
        names: of objects that were there before, by id: they stay what they are.
    """

    def __init__(self, join: Callable[[list[Any]], Any], names: Collection[int]) -> None:
        self._join, self._names = join, names
        self._made: dict[int, tuple[Any, Any]] = {}  # of objects, which may hold one another

    def of(self, values: list[Any]) -> Any:
        """The whole, of the ``values`` of each microbatch."""
        last = values[-1]
        if id(last) in self._names and all(x is last for x in values):  # it was there before, and travels by its name
            return last
        if isinstance(last, Tensor):
            return self._join(values)
        if isinstance(last, dict):
            return _filled(last, {key: self.of([value[key] for value in values]) for key in last})
        if isinstance(last, tuple) and hasattr(last, "_fields"):
            return type(last)(*(self.of(list(items)) for items in zip(*values, strict=True)))
        if isinstance(last, (list, tuple, deque)):
            items = [self.of(list(items)) for items in zip(*values, strict=True)]
            return deque(items, last.maxlen) if isinstance(last, deque) else type(last)(items)
        if dataclasses.is_dataclass(last) and not isinstance(last, type):
            new = copy.copy(last)
            for part in dataclasses.fields(last):
                value = self.of([getattr(value, part.name) for value in values])
                object.__setattr__(new, part.name, value)  # of a frozen one, too
            return new
        if is_plain_object(last) and holds(last, lambda x: isinstance(x, Tensor), self._names):
            return self._object(values)
        return last

    def _object(self, values: list[Any]) -> Any:
        last = values[-1]
        if id(last) not in self._made:
            new = copy.copy(last)
            self._made[id(last)] = last, new
            if new is not last:  # as what there is once is
                self._fill(new, values)
        return self._made[id(last)][1]

    def _fill(self, new: Any, values: list[Any]) -> None:
        own = getattr(new, "__dict__", None)
        if isinstance(own, dict):
            own.update({name: self.of([vars(value)[name] for value in values]) for name in own})
        for name, slot in slots_of(type(new)).items():
            if hasattr(new, name):
                slot.__set__(new, self.of([getattr(value, name) for value in values]))


def _filled(like: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the kind of ``like``, whatever its constructor wants."""
    new = copy.copy(like)
    for key, value in entries.items():
        new[key] = value
    return new
