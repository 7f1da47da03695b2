"""What depends on the batch alone is computed in a dry run, too, as in a trial of a step: it has its values."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import Tensor, nn

from lightning_par.absent.deferred.history import written_by
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.dry.any_values import of_any_values
from lightning_par.optim.torch_optimizers import BY_PARAMETER
from lightning_par.pipeline.between_steps.weights.remote_weight import Weight
from lightning_par.private.fake_tensors import (
    WITHOUT_VALUE,
    FakeTensor,
    FakeTensorMode,
    active_fakes,
    unset_fake_temporarily,
)
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.operators import Operator
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.functions import operator_of
from lightning_par.trial.known_values import count_write, forget, is_known
from lightning_par.trial.large_values import on_fakes, stays_small

_STEPS = frozenset(kind.__init__.__module__ for kind in BY_PARAMETER)  # classes may name another
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
"""Writes last whether a gradient overflowed; in a dry run none does."""


class KnownValues(TorchDispatchMode):
    """Lets operations on tensors that have values have values, and those that meet fakes of ``mode`` have none.

    What a fake is written into has no values any more, though it is real. A number that a step of torch's optimizers
    reads, as a norm, is taken to be 1: it scales values, and decides nothing.

    Args:
        mode: of the fakes; entered before.

    Example::

        with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues(mode):
            mask = torch.arange(4) < 2
            assert mask.any() and mask.nonzero().shape == (2, 1)
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active_fakes() is not self.mode:
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        shown: list[Tensor] = [x for x in given if isinstance(x, Weight) and not isinstance(x, FakeTensor)]
        if shown:
            return self._of_plain(func, args, kwargs, shown)
        if isinstance(func, Operator) and self._are_others(given):
            with unset_fake_temporarily():  # a fake of one would be of memory of its own
                return func(*args, **kwargs)
        if isinstance(func, Operator) and _have_values(given):
            if not stays_small(func, args, kwargs, given):
                return on_fakes(func, args, kwargs)
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
                _count_writes(func, written_by(func, args, kwargs))
                return result
        if _reads(func) and _steps_optimizer(sys._getframe(1)):
            return 1.0 if given[0].is_floating_point() else 1
        result = self._of_fakes(func, args, kwargs)
        written = [x for x in _written(func, args, kwargs, given) if not is_elsewhere(x)]  # that have memory
        for x in written:
            forget(x)
        _count_writes(func, written)
        return result

    def _are_others(self, given: list[Tensor]) -> bool:
        """Whether another mode's fakes are ``given``, as in a trial of a step, or tensors that never have values."""
        other = any(isinstance(x, FakeTensor) and x.fake_mode is not self.mode for x in given)
        return other or bool(given) and all(map(_is_on_meta, given))

    def _of_fakes(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except WITHOUT_VALUE:
            result = of_any_values(self.mode, func, args, kwargs)
            if result is NotImplemented:
                raise
            return result

    def _of_plain(self, func: Any, args: Any, kwargs: Any, shown: list[Tensor]) -> Any:
        """``func`` of tensors of which some are ``shown`` to user code between steps as others than they are."""
        with unset_fake_temporarily():
            plain = {id(x): x.as_subclass(Tensor) for x in shown}
        args, kwargs = tree_map(lambda x: plain.get(id(x), x), (args, kwargs))
        result = self.__torch_dispatch__(func, (), args, kwargs)
        back = {id(plain[id(x)]): x for x in shown}
        return tree_map(lambda x: back.get(id(x), x), result)


def _reads(func: Any) -> bool:
    return isinstance(func, Operator) and operator_of(func) == "_local_scalar_dense"


def _steps_optimizer(frame: types.FrameType | None) -> bool:
    """Whether what asks there for a number is a step of an optimizer that treats each parameter by itself."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _STEPS or name.partition(".")[0] not in ("torch", "lightning_par"):  # in its closure others run
            return name in _STEPS
        frame = frame.f_back
    return False


def _is_on_meta(x: Tensor) -> bool:
    return x.is_meta and type(x) in (Tensor, nn.Parameter)


def _have_values(given: list[Tensor]) -> bool:
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_meta and is_known(x) for x in given)


def _count_writes(func: Any, written: list[Tensor]) -> None:
    if operator_of(func) != "set_":  # which writes no values
        for x in written:
            count_write(x)


def _written(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> list[Tensor]:
    name = operator_of(func) if isinstance(func, Operator) else ""
    if not name or "batch_norm" in name:  # which does not say what it writes
        return given
    return written_by(func, args, kwargs)[: -1 if name == _UNSCALES else None]
