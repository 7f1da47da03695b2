"""Gathered weights that the user's code keeps beyond its call, as in a list: once the step's backward has ended they
become what they stood for, so that they are as the weights are then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.tensors import mark_parameter


class Escaped:
    """Those of one run."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._weights: list[Stored] = []

    def look(self, weights: Sequence[Stored], wholes: list[Any]) -> None:
        """Note those of ``wholes`` that someone has beside this list, and the weights that they stand for."""
        for number in range(len(wholes)):
            if sys.getrefcount(wholes[number]) > _ALONE and not any(x is wholes[number] for x in self._found):
                self._found.append(wholes[number])
                self._weights.append(weights[number])

    def become_stored(self) -> None:
        """No call, and no backward, uses them any more."""
        found, self._found = self._found, []
        weights, self._weights = self._weights, []
        for number in range(len(found)):
            if sys.getrefcount(found[number]) > _ALONE:
                _become(found[number], weights[number])


def _become(whole: Tensor, weight: Stored) -> None:
    twin = weight.twin()
    mark_parameter(twin)
    try:
        torch.utils.swap_tensors(whole, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"A module's forward keeps the weight {weight._name or ''!r} beyond its step, and a view of it or a weak "
            "reference to it, which data_parallel='fsdp' can't follow. Read it from the module where it is needed, "
            "keep a `clone()`, or write data_parallel='ddp'."
        ) from error


def _references(x: list[Any]) -> int:
    return max(sys.getrefcount(x[number]) for number in range(len(x)))


_ALONE = _references([object()])  # as `Escaped` counts, where a list alone has something
