"""What each rank makes for itself when it runs a step: a class, a function, an iterator, which can't be sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.program.program import is_located
from lightning_par.pipeline.trial.placeholders import AbsentNumber
from lightning_par.python_state.referents import atoms_in, holds

Made = Mapping[tuple[str, Any], Any]
"""What a run stored, by the name of the object that holds it and where in it."""


def place_of_made(name: str, key: Any) -> str:
    """The name by which the ranks know what each has made to be stored there."""
    return f"made for {name}[{key!r}]"


def holds_values(value: Any, known: Collection[int]) -> bool:
    """Whether anything in ``value`` stands for a value of the model that was not there, as far as can be seen.

    Args:
        value: any object.
        known: ids of objects that need not be looked into.
    """
    return holds(value, lambda x: isinstance(x, AbsentNumber) or isinstance(x, Tensor) and is_located(x), known)


ByPlace = Mapping[str, Mapping[str, Any]]
"""What all ranks made when a step was recorded: by the name of the object that holds it, then by `place_of_made`."""


def flat(made: ByPlace) -> dict[str, Any]:
    """What is ``made``, by place alone."""
    return {place: x for of in made.values() for place, x in of.items()}


def stand_in_for(value: Any, name: str, key: Any, made: ByPlace) -> str | None:
    """The place of what each rank has made itself that may stand for ``value``, stored in ``name`` at ``key``.

    It may be at another key: where a library keeps something for each class of tensors, a record meets other classes.
    """
    of, first = made.get(name, {}), place_of_made(name, key)
    places = (first, *(place for place in of if place != first)) if first in of else (*of,)
    return next((place for place in places if _is_alike(of[place], value)), None)


def _is_alike(own: Any, value: Any) -> bool:
    """As an entry of a library's cache, ``own`` holds nothing of a module, and the same numbers and strings."""
    if type(own) is not type(value) or holds(own, lambda x: isinstance(x, (AbsentNumber, Tensor, nn.Module))):
        return False
    return atoms_in(own) == atoms_in(value)
