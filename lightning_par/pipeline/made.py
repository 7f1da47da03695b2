"""What each rank makes for itself when it runs a step: a class, a function, an iterator, which can't be sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_par.pipeline.located import is_located
from lightning_par.pipeline.placeholders import AbsentNumber
from lightning_par.watch.inner import holds

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
