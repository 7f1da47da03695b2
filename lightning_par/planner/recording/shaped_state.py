"""What optimizers keep that goes by the shapes of weights, as Adafactor's moments of rows and columns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.fsdp.stored_parameter import composed
from lightning_par.mesh.positions import Positions
from lightning_par.optim.lone_step import state_after_a_step
from lightning_par.planner.recording.profile import Parameter
from lightning_par.planner.replay.counting_axis import CountingAxis
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import ShardedTensor, leaf

_SMALL = 2**16
"""Elements of weights that may be there: code of an optimizer's that goes by their values runs on these alone."""


@dataclass(eq=False)
class ShapedState:
    """Of some parameters.

    Args:
        optimizers: of each by its first name, with the options of its step.

    Example::

        assert ShapedState({"weight": (adafactor, group)}).nbytes(parameter, torch.float32) > 0
    """

    optimizers: Mapping[str, tuple[Optimizer, Mapping[str, Any]]]
    _known: dict[Any, int] = field(default_factory=dict)

    def nbytes(self, p: Parameter, dtype: torch.dtype, tensor: int = 0, ranks: int = 1, rank: int = 0) -> int:
        """Bytes that a rank keeps: those of a step of the same optimizer on what lies as its part does.

        Args:
            p: the parameter.
            dtype: in which it is held.
            tensor: the index along the tensor axis.
            ranks: that store a part each of what they use.
            rank: the index among these.

        Raises:
            Exception: whatever the optimizer's step raises.
        """
        optimizer, group = self.optimizers[p.name]
        key = id(group), p.shape, p.dim, p.counts, dtype, tensor, ranks, rank
        if key not in self._known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._known[key] = _state_bytes(optimizer, group, _Form.of(p, tensor, ranks, rank), dtype)
        return self._known[key]


@dataclass(frozen=True)
class _Form:
    """How a part of a weight lies: its shape, and which dim is split over which ranks, if any is."""

    shape: tuple[int, ...]
    split: tuple[int, Positions, int, int] | None = None  # with the number of ranks, and which this one is

    @staticmethod
    def of(p: Parameter, tensor: int, ranks: int, rank: int) -> _Form:
        stored = p.stored_dim(ranks) if ranks > 1 else None
        dim = p.dim if p.dim is not None else stored
        if dim is None:
            return _Form(p.shape)
        over, own = 1, 0
        positions = Positions.of(np.zeros(p.shape[dim], dtype=np.int64))
        if p.dim is not None:
            over, own = len(p.counts), tensor
            positions = Positions.of(np.repeat(np.arange(over), p.counts))
        if stored is not None:
            positions, own, over = composed(positions, over, ranks), rank * over + own, over * ranks
        shape = (*p.shape[:dim], positions.count(own), *p.shape[dim + 1 :])
        return _Form(shape, (dim, positions, over, own))

    def weight(self, dtype: torch.dtype) -> Tensor:
        held: Tensor = nn.Parameter(torch.ones(self.shape, dtype=dtype))
        if self.split is None:
            return held
        dim, positions, over, own = self.split
        made = ShardedTensor(held, dim, positions, CountingAxis(over, own))
        mark_parameter(made)
        return made


def _state_bytes(optimizer: Optimizer, group: Mapping[str, Any], form: _Form, dtype: torch.dtype) -> int:
    from lightning_par.dry.values import KnownValues  # of a package that takes some of the planner

    if prod(form.shape) <= _SMALL:
        return _held(state_after_a_step(optimizer, form.weight(dtype), group))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues(mode):
        return _held(state_after_a_step(optimizer, form.weight(dtype), group))


def _held(state: Mapping[Any, Any]) -> int:
    parts = [leaf(x) for x in state.values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in parts)
