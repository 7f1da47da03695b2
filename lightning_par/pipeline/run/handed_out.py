"""What a unit hands out by an attribute of a module in it, as a loss of its own that the step reads afterwards.

``self.aux_loss = ...`` in a layer is on the rank that runs the layer alone. So that other stages can have it, its call
returns it beside its result, and leaves the attribute as it was; what is around the call, which all ranks run, sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.plan.stage_ranges import Attribute
from lightning_par.pipeline.run.errors import OtherStageError
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS
from lightning_par.python_state.nested_tensors import returned_tensors, tensors_in

_MISSING = object()


class HandingOut:
    """A call of the unit ``module`` that returns what it sets ``attributes`` to, beside its result.

    Example::

        call = HandingOut(layer, layer.forward, (("", "aux_loss"),))
        y = call.taken(call(x))  # as `layer.forward(x)`
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], attributes: tuple[Attribute, ...]) -> None:
        self._module, self._original, self._attributes = module, original, attributes

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[Attribute, Any]]:
        places = {(name, key): vars(self._module.get_submodule(name)) for name, key in self._attributes}
        before = {at: held.get(at[1], _MISSING) for at, held in places.items()}
        result = self._original(*args, **kwargs)
        out = {at: held[at[1]] for at, held in places.items() if held.get(at[1], _MISSING) is not before[at]}
        for at in out:
            if before[at] is _MISSING:
                del places[at][at[1]]
            else:
                places[at][at[1]] = before[at]
        return result, out

    def as_recorded(self, recorded: tuple[Any, dict[Attribute, Any]], *args: Any, **kwargs: Any) -> Any:
        """As a call, where all ranks know of what it ``recorded``: what it does not set this time stays, and goes out.

        Raises:
            OtherStageError: it hands out something else.
        """
        result, out = self(*args, **kwargs)
        known = recorded[1]
        now = {(name, key): vars(self._module.get_submodule(name)).get(key) for name, key in known} | out
        other = next((at for at, x in now.items() if at not in known or _count(x) != _count(known[at])), None)
        if other is not None:
            kind, (_, key) = type(self._module.get_submodule(other[0])).__name__, other
            raise OtherStageError(
                f"{kind} sets its attribute {key!r} as it did not when the step was recorded, or does not any more. "
                "Other stages of the pipeline can't know of that. Set it in each call, or return the value."
            )
        return result, {at: now[at] for at in known}

    def taken(self, returned: tuple[Any, dict[Attribute, Any]]) -> Any:
        """The unit's result alone, of what a call ``returned``: its attributes are set."""
        result, out = returned
        for (name, key), value in out.items():
            setattr(self._module.get_submodule(name), key, value)
        return result


def expecting(original: Callable[..., Any], recorded: Any) -> Callable[..., Any]:
    """The call of a unit ``original``, which hands out what it did when its result was ``recorded``."""
    return partial(original.as_recorded, recorded) if isinstance(original, HandingOut) else original


def _count(value: Any) -> int:
    return len(returned_tensors(value))


def attributes_with(
    x: Tensor, module: nn.Module, unit: str, homes: Collection[str]
) -> dict[str, tuple[Attribute, ...]]:
    """Where ``x``, which was made within ``unit``, is held by an attribute of a module in that; likewise in all units
    that have such a module. Empty where it is held otherwise."""
    within = module.get_submodule(unit)
    found = {(type(m), key) for m in within.modules() for key, value in vars(m).items() if _is_held(x, key, value)}
    return {
        path: tuple(places)
        for path in (homes if found else ())
        if (
            places := [
                (name, key)
                for name, m in module.get_submodule(path).named_modules()
                for kind, key in sorted(found, key=lambda pair: pair[1])
                if kind is type(m)
            ]
        )
    }


def _is_held(x: Tensor, key: str, value: Any) -> bool:
    return key not in (BUFFERS, MODULES, PARAMETERS) and any(x is held for held in tensors_in(value))
