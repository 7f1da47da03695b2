"""What stands for a number that is read from a value that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lightning_par.pipeline.microbatch import SamplesMixError
from lightning_par.rules.table import user_line


class AbsentNumber(float):
    """A number that only the last stage knows: arithmetic keeps that in mind, and to decide by it is noted.

    Where the batch is cut into microbatches, no one knows the whole batch's number while the step runs: a decision by
    it raises SamplesMixError.
    """

    cut = False  # whether the batch is cut in the run that is on

    def _known(self) -> None:
        if AbsentNumber.cut:
            raise SamplesMixError(f"the step decides by a value of the whole batch at {user_line()}")


def _arithmetic(name: str) -> Any:
    def method(self: AbsentNumber, *others: Any) -> Any:
        found = getattr(float, name)(self, *others)
        return AbsentNumber(found) if isinstance(found, float) else found

    return method


def _decision(name: str) -> Any:
    def method(self: AbsentNumber, *others: Any) -> Any:
        self._known()
        return getattr(float, name)(self, *others)

    return method


for _name in ("add radd sub rsub mul rmul truediv rtruediv neg abs pow rpow floordiv rfloordiv mod rmod").split():
    setattr(AbsentNumber, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in ("lt le gt ge eq ne bool int").split():
    setattr(AbsentNumber, f"__{_name}__", _decision(f"__{_name}__"))
AbsentNumber.__hash__ = float.__hash__  # type: ignore[method-assign]


def read_placeholder(name: str, x: Tensor, args: Any) -> Any:
    """What the function ``name``, which reads ``x``, returns while ``x`` is absent."""
    if name in ("item", "__float__", "__complex__"):
        return AbsentNumber(1.0)
    if name in ("__bool__", "is_nonzero", "equal", "allclose", "__contains__", "__int__", "__index__"):
        if AbsentNumber.cut:
            raise SamplesMixError(f"the step decides by a value of the whole batch at {user_line()}")
        return 1 if name in ("__int__", "__index__") else False
    if name in ("numpy", "__array__"):
        return np.zeros(tuple(x.shape))
    if name == "tolist":
        return np.zeros(tuple(x.shape)).tolist()
    return format(0.0, args[1]) if len(args) > 1 and args[1] else "0."
