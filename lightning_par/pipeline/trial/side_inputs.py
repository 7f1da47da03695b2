"""Values that a unit takes by another way than its arguments: an object that is one, an attribute, a closure, what
stands for its parameters in a call of `torch.func.functional_call`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.plan.stage_ranges import HandsOut
from lightning_par.pipeline.program.program import is_located
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor

_alias = torch.ops.aten.alias.default


class UnitError(NoScheduleError):
    """A module can't be taken as a whole; what is in it may be, taken by itself.

    Attributes:
        unit: the module, if it is known.
        units: all of them, where there are several.
        value: that was made within the unit, and is used outside.
        hands_out: the attributes by which this and such units hand out such values.
    """

    def __init__(
        self, message: str, unit: str | None, units: tuple[str, ...] = (), value: Tensor | None = None
    ) -> None:
        super().__init__(message)
        self.unit, self.units, self.value = unit, units, value
        self.hands_out: HandsOut = {}


class Handed:
    """Watches the functions that units call in the recorded run of a step.

    Args:
        homes: every unit, with where its calls run.
        values: by id, those that the step holds outside of units.
        parameters: by id, all of the module.

    Attributes:
        buffers: by id, those of units, with the unit.
        weights: the ids of the parameters of units, as the step begins.
        found: by id, values and parameters that the unit which is running took and neither has nor was given.
    """

    def __init__(
        self, homes: Mapping[str, tuple[int, ...]], values: Mapping[int, Any], parameters: Mapping[int, str]
    ) -> None:
        self.homes, self.values, self.parameters = homes, values, parameters
        self.buffers: dict[int, str] = {}
        self.weights: dict[str, set[int]] = {}
        self.found: dict[int, Tensor] = {}
        self._path: str | None = None
        self._own: set[int] = set()
        self._buffers: set[int] = set()  # of the unit that is running
        self._call = 0

    @contextmanager
    def unit(self, path: str, module: nn.Module, inputs: list[Tensor]) -> Iterator[None]:
        """Inside, the unit ``path`` runs, and was given ``inputs``."""
        own = (x for x in module.parameters() if id(x) not in self.values and self._is_of(path, x))
        self._call += 1
        self._path, self._own, self.found = path, {*map(id, inputs), *map(id, own)}, {}
        self._buffers = set(map(id, module.buffers()))
        try:
            yield
        finally:
            self._path = None

    def _is_of(self, path: str, x: Tensor) -> bool:
        """Whether the unit ``path`` has the parameter ``x`` by itself: for a call it may be given another one's."""
        weights = self.weights.get(path)
        return weights is None or id(x) in weights or id(x) not in self.parameters

    def note(self, given: Any, result: Any) -> None:
        """A function was called with ``given``.

        Raises:
            UnitError: it takes a value from within a unit that is on another stage.
        """
        if self._path is None:
            return
        inputs, results = tensors_in(given), tensors_in(result)
        for x in inputs:
            maker = maker_of(x)
            if id(x) in self._own or maker == self._path and x._made_in_call == self._call:  # type: ignore[attr-defined]
                continue
            if maker is None and id(x) not in self._buffers:
                maker = self.buffers.get(id(x))
            if maker is not None:
                self._check(maker, x)
            elif is_located(x) and (id(x) in self.values or id(x) in self.parameters):
                self.found[id(x)] = x
        if any(is_located(x) or id(x) in self._own or maker_of(x) for x in inputs):  # no constant, as of a cache
            for x in results:
                if not any(x is y for y in inputs) or is_located(x):
                    x._made_within, x._made_in_call = self._path, self._call  # type: ignore[attr-defined]

    @staticmethod
    def returned(x: Tensor) -> Tensor:
        """What stands for a value outside of the unit that made it: another object, so as to tell which of them an
        object or an attribute holds."""
        return x.with_local(_alias(x.local)) if isinstance(x, ShardedTensor) else _alias(x)

    def _check(self, maker: str, x: Tensor) -> None:
        places = {*self.homes.get(maker, ()), *self.homes.get(str(self._path), ())}
        if len(places) > 1:
            whose = "its last call" if maker == self._path else f"{maker!r}"
            raise UnitError(
                f"{user_line()}: {self._path!r} uses a value from within {whose} that was not returned: an object or "
                "an attribute handed it on. Other stages of the pipeline can't see that. Return it, and take it as an "
                "argument; or name stages so that both are in one; or use TensorParallelStrategy.",
                maker,
                value=x,
            )


def maker_of(x: Tensor) -> str | None:
    """The unit within which ``x`` was made."""
    return getattr(x, "_made_within", None)
