"""What depends on the batch alone is computed in a dry run, too, as in a trial of a step: it has its values."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.history import written_by
from lightning_par.private.fake_tensors import FakeTensorMode, active_fakes, unset_fake_temporarily
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.operators import Operator
from lightning_par.private.pytree import tree_leaves
from lightning_par.sharded.functions import operator_of
from lightning_par.trial.known_values import forget, is_known

LARGEST = 2**22
"""Elements of a tensor that has values: all of them take memory and time."""


_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
"""Writes last whether a gradient overflowed; in a dry run none does."""


class KnownValues(TorchDispatchMode):
    """Lets operations on tensors that have values have values, and those that meet fakes of ``mode`` have none.

    What a fake is written into has no values any more, though it is real.

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
        if isinstance(func, Operator) and _have_values(given) and self._is_small(func, args, kwargs, given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for x in _written(func, args, kwargs, given):
            forget(x)
        return result

    def _is_small(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> bool:
        """Whether what ``func`` makes is; which is asked of fakes only where it may not be."""
        if given and prod(max(1, x.numel()) for x in given) <= LARGEST:
            return True
        if any(tag in func.tags for tag in _DATA):
            return all(x.numel() <= LARGEST for x in given)
        return all(x.numel() <= LARGEST for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor))


def _have_values(given: list[Tensor]) -> bool:
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_meta and is_known(x) for x in given)


def _written(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> list[Tensor]:
    name = operator_of(func) if isinstance(func, Operator) else ""
    if not name or "batch_norm" in name:  # which does not say what it writes
        return given
    return written_by(func, args, kwargs)[: -1 if name == _UNSCALES else None]
