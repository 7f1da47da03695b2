"""What has come from other stages for one stage on one microbatch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_par.pipeline.program.microbatch_values import local_shape
from lightning_par.pipeline.program.program import Key, Program
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.private.tensors import with_node
from lightning_par.sequence.staged_tokens import Tokens
from lightning_par.sharded.tensor import ShardedTensor


class Arrived:
    """The values that a stage takes; a call gives one as the step meets it.

    Args:
        values: this rank's part of each.
        program: of the step.
        axis: the microbatch, None where the batch is not cut.
        tokens: how sequences lie on the ranks of the stage.

    Example::

        receive = crossing.receive(stage=1, microbatch=0)
        x = receive(key)  # of the whole batch's shape, of which this rank has the microbatch's samples
    """

    def __init__(
        self, values: Mapping[Key, Tensor], program: Program, axis: MicrobatchAxis | None, tokens: Tokens
    ) -> None:
        self._values, self._program, self._axis, self._tokens = values, program, axis, tokens

    def own(self, key: Key) -> Tensor:
        """This rank's part; where it has a graph it is no leaf, as user code may write into it."""
        x = self._values[key]
        return with_node(x) if x.requires_grad else x

    def __call__(self, key: Key) -> Tensor:
        x, model, axis = self.own(key), self._program.values[key], self._axis
        if self._tokens.axis is not None:
            x = self._tokens.wrapped(x, local_shape(model, axis))
        if axis is None or not isinstance(model, ShardedTensor):
            return x
        return ShardedTensor(x, model.sharded_dim, model.positions, axis)
