"""The tokens of a run: the step is recorded as if they were split, which tells what it does whole, too.

The plan is made of both. Where they are to be split in another way, or what the step does whole is not known, it runs
once more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_par.mesh.agree import agree
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.layout import Groups
from lightning_par.sequence.batch_tensor import mark
from lightning_par.sequence.plan import (
    SequenceDim,
    SequencePlan,
    attends_in_parts,
    first_plan,
    make_plan,
    other_plans,
)
from lightning_par.sequence.scheme import Asked
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.sequence.staged_tokens import Tokens
from lightning_par.sequence.table import show_plan
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.gradient_shares import shared_around
from lightning_par.sharded.nested_padding import pad_as_nested
from lightning_par.sharded.patches import NODES, SHARDED, SHARES, Patches
from lightning_par.sharded.patches.module_hooks import refuse_partial_hooks
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.strategies.part import Part
from lightning_par.tensor.kept_tensors import make_held_whole
from lightning_par.tensor.residual_stream import whole_residual
from lightning_par.trial.batch_tensors import names_of, tensors_of
from lightning_par.trial.first_step import FirstStep
from lightning_par.trial.recording import Recording


class PlanningAxis(SequenceAxis):
    """Rank 0 of an axis on which nothing moves: tensors are fake. It notes what would gather."""

    pretends = True
    tells_gathers = False

    def __init__(self, ranks: int, zigzag: bool) -> None:
        super().__init__("sequence", tuple(range(ranks)), 0, None)
        self.zigzag = zigzag
        self.found: Counter[tuple[str, str]] = Counter()

    def about_to_gather(self, func: Any, x: Tensor) -> None:
        if func != "full_tensor":  # the function that asked for it is counted
            self.found[name_of(func), user_line()] += 1

    def start_all_reduce_(self, x: Tensor, purpose: str, op: Any = "sum") -> None:
        return None

    def all_gather(self, x: Tensor, purpose: str, shape: Sequence[int] | None = None) -> Tensor:
        return x.new_empty((self.size, *x.shape) if shape is None else tuple(shape))


class TokensPart(Part):
    """Plans how tokens are shared out in one run of a Trainer's entry point, and marks its batches.

    Args:
        groups: the mesh axes.
        wish: the user's ``sequence_dim``.
        asked: the user's ``attention``.
        axis: along which tokens are shared out; the sequence axis by default.
    """

    def __init__(self, groups: Groups, wish: SequenceDim, asked: Asked, axis: Any = None) -> None:
        self.groups = groups
        self.axis: Any = groups.sequence if axis is None else axis
        self.wish = wish
        self.asked = asked
        self.plan: SequencePlan | None = None
        self._seconds = 0.0
        self._hooks: list[Any] = []

    def axes(self) -> list[Axis]:
        grid = getattr(getattr(self.groups.sequence, "attention", None), "grid", None)
        return [self.axis, *([] if grid is None else vars(grid).values())]

    def patches(self) -> tuple[Patches, ...]:
        return SHARDED, SHARES, NODES

    def make_plan(self, first: FirstStep) -> None:
        """See `Part.make_plan`.

        Raises:
            ValueError: the user's ``sequence_dim`` fits no tensor of the batch; on every rank.
        """
        first.batch  # noqa: B018  # all ranks come for it, whatever it takes
        started = time.monotonic()
        _, told = agree(first.world, lambda: self._planned(first), lambda plan: plan if first.world.tells() else None)
        self.plan, self.axis.zigzag = told[0], told[0].zigzag
        self._seconds = time.monotonic() - started

    def apply(self, first: FirstStep) -> None:
        assert self.plan is not None
        self._hooks = pad_as_nested(first.module)
        if self.groups.sequence.size > 1 and first.world.rank == 0:
            show_plan(self.plan, self.asked, self.groups.layout, self._seconds)
        refuse_partial_hooks(first.module)
        shared_around(self.groups.sharding)

    def given(self, batch: Any) -> Any:
        return self.marked(batch)

    def undo(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        make_held_whole([module, *callbacks])
        whole_residual(self.groups.tensor)

    def close(self) -> None:
        shared_around(())

    def marked(self, batch: Any) -> Any:
        """``batch``, whose sequences are known as such."""
        return batch if self.plan is None else mark(batch, self.plan.dim_of, self.axis)

    def tokens(self, batch: Any) -> Tokens:
        """How sequences lie between stages, in a step on ``batch``."""
        lengths: set[int] = set()
        plan = self.plan

        def note(number: int, x: Tensor) -> None:
            dim = None if plan is None else plan.dim_of(number, x)
            if dim is not None:  # what is shifted by one is shorter by one
                lengths.update((x.shape[dim], x.shape[dim] - 1))

        mark(batch, note, self.axis)
        return Tokens(self.axis, lengths)

    def _planned(self, first: FirstStep) -> SequencePlan:
        ranks, batch = self.axis.size, first.batch
        if batch is None:
            return SequencePlan(ranks, (), (), (), stopped="there was no batch to look at")
        supposed = first_plan(tensors_of(batch), names_of(batch), ranks, self.wish)
        tried, split = self._tried(first, supposed)
        recording = first.recording
        plan = make_plan(
            recording, recording.names, ranks, self.wish, self.asked, self.axis is not self.groups.sequence
        )
        if (plan.dims, plan.zigzag) == (supposed.dims, supposed.zigzag):
            plan = replace(plan, gathers=tried.gathers, stopped=plan.stopped or tried.stopped)
        else:
            plan, split = self._tried(first, plan)
        if split.refused is not None:
            raise ValueError(split.refused)
        parts, attends = attends_in_parts(split)
        if self.wish is None and parts < attends:
            for other in other_plans(recording, plan):
                tried, split = self._tried(first, other)
                more, _ = attends_in_parts(split)
                # if the step still runs as far as it does whole
                if more > parts and split.stopped == recording.stopped:
                    plan, parts = tried, more
                if parts == attends:
                    break
        return plan

    def _tried(self, first: FirstStep, plan: SequencePlan) -> tuple[SequencePlan, Recording]:
        """``plan`` with what gathers under it, and what it was read from."""
        axis = PlanningAxis(plan.ranks, plan.zigzag)
        split = first.recorded_split(lambda fake: mark(fake, plan.dim_of, axis))
        gathers = tuple((name, place, count) for (name, place), count in axis.found.items())
        return replace(plan, gathers=gathers, stopped=plan.stopped or split.stopped), split
