"""Seconds of Python in a step, which add to those of kernels and messages where no device works meanwhile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overhead:
    """What something adds.

    Attributes:
        step: seconds of each time it comes.
        each: seconds of each thing in it; see `Overheads`.
    """

    step: float = 0.0
    each: float = 0.0


_NONE = Overhead()


@dataclass(frozen=True)
class Overheads:
    """By what a layout has. Where a device works while Python prepares what comes next, all are zero.

    Attributes:
        plain: of a training step, and of each of its functions, forward and backward.
        update: of a step of the optimizer, and of each parameter in it.
        replicas: more of the same where replicas average their gradients.
        tensor: more of both of ``plain`` where weights are split, and the residual stream is not.
        residual: the same where both are.
        sequence: the same where tokens are.
        pipeline: of a training step in stages, and of a microbatch in each stage.
        stored: of a training step where weights are stored in parts, and of each unit that gathers its own.

    Example::

        overheads = Overheads(plain=Overhead(step=1e-3, each=2e-5))
        assert overheads.function(tensor=1, sequence=1, residual=False) == 2e-5
    """

    plain: Overhead = _NONE
    update: Overhead = _NONE
    replicas: Overhead = _NONE
    tensor: Overhead = _NONE
    residual: Overhead = _NONE
    sequence: Overhead = _NONE
    pipeline: Overhead = _NONE
    stored: Overhead = _NONE

    def function(self, tensor: int, sequence: int, residual: bool) -> float:
        """Seconds of one function, forward and backward, with these sizes of axes."""
        return self.plain.each + sum(one.each for one in self._split(tensor, sequence, residual))

    def training_step(self, tensor: int, sequence: int, residual: bool) -> float:
        """Seconds of one training step beside its functions."""
        return self.plain.step + sum(one.step for one in self._split(tensor, sequence, residual))

    def _split(self, tensor: int, sequence: int, residual: bool) -> list[Overhead]:
        found = [self.residual if residual else self.tensor] if tensor > 1 else []
        return [*found, self.sequence] if sequence > 1 else found
