"""Calls of units, the modules that are placed as a whole: they ask the run that is on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_par.pipeline.plan.stage_ranges import Attribute, HandsOut
from lightning_par.pipeline.run.located import Run
from lightning_par.private.module_calls import get_call, plain_call, reset_call, set_call, takes

_NOTHING: HandsOut = MappingProxyType({})


class LocatedCall:
    """Takes the place of a unit's call."""

    def __init__(self, path: str, module: nn.Module, attributes: tuple[Attribute, ...] = ()) -> None:
        self.path = path
        self.module = module
        self.attributes = attributes  # by which it hands something out
        self.original = plain_call(module)
        self._taken: set[tuple[Any, ...]] = set()  # how many arguments, and of which names, the module takes
        self.outside: Callable[..., Any] | None = None
        """Takes calls while no run is on; see `lightning_par.pipeline.between_steps.units.module_calls`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is called as it is

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()  # None, as for a deep copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = Run.current
        if run is None and self.outside is not None:
            return self.outside(self.path, self.module, self.original, args, kwargs)
        if run is None or run.depth:  # within another unit it is part of that one's event
            return self.original(*args, **kwargs)
        if not self._takes(args, kwargs):  # it raises on all ranks alike, before anything has run: that is no event
            return self.original(*args, **kwargs)
        return run.call(self.path, self.module, self.original, args, kwargs, self.attributes)

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the module can be called so, as code asks that tries to give ``mask=`` to layers of any kind."""
        given = (len(args), *kwargs)
        if given in self._taken:
            return True
        if takes(self.module, args, kwargs):
            self._taken.add(given)
            return True
        return False


def intercept_units(module: nn.Module, units: Iterable[str], hands_out: HandsOut = _NOTHING) -> None:
    """Let calls of the ``units`` of ``module`` ask the run that is on, and return what they hand out."""
    for path in units:
        unit = module.get_submodule(path)
        set_call(unit, LocatedCall(path, unit, hands_out.get(path, ())))


def release_units(module: nn.Module) -> None:
    """Undo `intercept_units`."""
    for unit in module.modules():
        call = get_call(unit)
        if isinstance(call, LocatedCall):
            reset_call(unit, call.original)
