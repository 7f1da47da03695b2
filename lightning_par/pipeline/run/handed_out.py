"""What a unit hands out by an attribute of a module in it, as a loss of its own that the step reads afterwards.

``self.aux_loss = ...`` in a layer, or ``self.losses.append(...)``, is on the rank that runs the layer alone. So that
other stages can have it, its call returns it beside its result, and leaves all as it was; what is around the call,
which all ranks run, sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_par.pipeline.plan.stage_ranges import Attribute
from lightning_par.pipeline.run.errors import OtherStageError
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS
from lightning_par.python_state.nested_tensors import returned_tensors, tensors_in

_MISSING = object()


class Returned(NamedTuple):
    """What a call that hands something out returns.

    Attributes:
        result: the unit's own.
        stored: what it has set attributes to.
        added: what it has put into lists and dicts that are attributes: items, or entries.
    """

    result: Any
    stored: dict[Attribute, Any]
    added: dict[Attribute, Any]


class HandingOut:
    """A call of the unit ``module`` that returns what it sets ``attributes`` to, or adds to them, beside its result.

    Example::

        call = HandingOut(layer, layer.forward, (("", "aux_loss"),))
        y = call.taken(call(x))  # as `layer.forward(x)`
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], attributes: tuple[Attribute, ...]) -> None:
        self._module, self._original, self._attributes = module, original, attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        places = {at: self._holder(at) for at in self._attributes}
        before = {at: held.get(at[1], _MISSING) for at, held in places.items()}
        inside = {at: x.copy() for at, x in before.items() if type(x) in (list, dict)}
        result = self._original(*args, **kwargs)
        stored = {at: held[at[1]] for at, held in places.items() if held.get(at[1], _MISSING) is not before[at]}
        for at in stored:
            if before[at] is _MISSING:
                del places[at][at[1]]
            else:
                places[at][at[1]] = before[at]
        added = {at: _taken_off(before[at], x) for at, x in inside.items()}
        return Returned(result, stored, {at: x for at, x in added.items() if x})

    def _holder(self, at: Attribute) -> dict[str, Any]:
        return vars(self._module.get_submodule(at[0]))

    def as_recorded(self, recorded: Returned, *args: Any, **kwargs: Any) -> Returned:
        """As a call, where all ranks know of what it ``recorded``: what it does not set this time stays, and goes out.

        Raises:
            OtherStageError: it hands out something else.
        """
        result, stored, added = self(*args, **kwargs)
        now = {at: self._holder(at).get(at[1]) for at in recorded.stored} | stored
        other = _other(now, recorded.stored) or _other(added, recorded.added)
        if other is not None:
            kind, (_, key) = type(self._module.get_submodule(other[0])).__name__, other
            raise OtherStageError(
                f"{kind} sets its attribute {key!r} as it did not when the step was recorded, or does not any more. "
                "Other stages of the pipeline can't know of that. Set it in each call, or return the value."
            )
        return Returned(result, {at: now[at] for at in recorded.stored}, {at: added[at] for at in recorded.added})

    def taken(self, returned: Returned) -> Any:
        """The unit's result alone, of what a call ``returned``: its attributes are set."""
        for (name, key), value in returned.stored.items():
            setattr(self._module.get_submodule(name), key, value)
        for at, value in returned.added.items():
            held = self._holder(at)[at[1]]
            held.extend(value) if type(held) is list else held.update(value)
        return returned.result


def _taken_off(held: Any, before: Any) -> Any:
    """The items or entries that the list or dict ``held`` has beside those of ``before``; they are gone from it."""
    if type(held) is list:
        items = held[len(before) :]
        del held[len(before) :]
        return items
    entries = {key: x for key, x in held.items() if x is not before.get(key, _MISSING)}
    if entries:
        held.clear()
        held.update(before)
    return entries


def _other(now: dict[Attribute, Any], recorded: dict[Attribute, Any]) -> Attribute | None:
    """An attribute of which a call hands out something else than was ``recorded``."""
    both = {**now, **recorded}
    return next((at for at in both if at not in now or at not in recorded or _unlike(now[at], recorded[at])), None)


def _unlike(value: Any, other: Any) -> bool:
    return len(returned_tensors(value)) != len(returned_tensors(other))


def expecting(original: Callable[..., Any], recorded: Any) -> Callable[..., Any]:
    """The call of a unit ``original``, which hands out what it did when its result was ``recorded``."""
    return partial(original.as_recorded, recorded) if isinstance(original, HandingOut) else original


def attributes_with(
    x: Tensor, module: nn.Module, unit: str, homes: Collection[str]
) -> dict[str, tuple[Attribute, ...]]:
    """Where ``x``, which was made within ``unit``, is held by an attribute of a module in that; likewise in all units
    that have such a module. Empty where it is held otherwise."""
    within = module.get_submodule(unit)
    held = {(type(m), key): None for m in within.modules() for key, value in vars(m).items() if _is_held(x, key, value)}
    found = {
        path: tuple((name, key) for name, m in module.get_submodule(path).named_modules() for kind, key in held
                    if kind is type(m))
        for path in homes
    }  # fmt: skip
    return {path: places for path, places in found.items() if places}


def _is_held(x: Tensor, key: str, value: Any) -> bool:
    return key not in (BUFFERS, MODULES, PARAMETERS) and any(x is held for held in tensors_in(value))
