"""A step about to run: its microbatches, its program, and what depends on the batch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_par.pipeline.effects.random_draws import is_standing
from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.microbatch_values import share_of
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.tape import Tape
from lightning_par.pipeline.program.update_calls import UpdateCall
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.python_state import generators
from lightning_par.trial.step import Step


@dataclass
class Part:
    """What is known of one microbatch before it runs.

    Attributes:
        step: with the whole batch, or with the microbatch where that is trained as a batch of its own.
        program: of the step.
        memo: what depends on the batch alone.
        before: where the generators of numpy and `random` stand before it.
        axis: the microbatch's place among the others; None where the step sees no others.
        share: by which its loss counts.
        apart: whether it is a batch of its own.
        tape: what the dry run saw of the step, where stages may be run by it.
    """

    step: Step
    program: Program
    memo: BatchValues
    before: tuple[Any, Any]
    axis: MicrobatchAxis | None = None
    share: float = 1.0
    apart: bool = False
    tape: Tape | None = None


@dataclass
class Prepared:
    """A step about to run: its microbatches, where random numbers stand before and after it, and the functions by which
    it updates weights."""

    parts: list[Part]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    coupled: bool = False
    updates: Sequence[UpdateCall] = ()

    @property
    def step(self) -> Step:
        return self.parts[0].step

    @property
    def program(self) -> Program:
        return self.parts[0].program

    @property
    def whole(self) -> Any:
        """The batch that the step was given, None where it was given parts of it as batches of their own."""
        return None if self.coupled else self.step.batch

    @property
    def cut(self) -> bool:
        """Whether the step sees the whole batch, of which each run computes a part."""
        return len(self.parts) > 1 and not self.coupled

    @classmethod
    def by(
        cls,
        step: Step,
        program: Program,
        memo: BatchValues,
        tape: Tape | None,
        start: tuple[Any, ...],
        updates: Sequence[UpdateCall],
    ) -> Prepared:
        """``step`` by its ``program``, once a dry run has filled ``memo``.

        Args:
            step: on the whole batch.
            program: its own.
            memo: what depends on the batch alone.
            tape: what the dry run saw.
            start: where random numbers stood before that.
            updates: what it saw done with weights alone.
        """
        after = generators.global_state()
        before, count = (start[2], start[3]), program.microbatches  # of numpy and of `random`
        memo.standing = before if is_standing(before, (after[2], after[3])) else None
        parts = [Part(step, program, memo, before)]
        if count > 1:
            told = tape if memo.standing is not None and not memo.anew else None
            # a loss that no sample goes into would count once for each microbatch
            shares = [1.0 if program.loss_is_share else share_of(program, axis) for axis in program.axes]
            pairs = zip(program.axes, shares, strict=True)
            parts = [Part(step, program, memo, before, axis, share, tape=told) for axis, share in pairs]
        return cls(parts, start, after, updates=updates)
