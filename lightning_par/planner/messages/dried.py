"""What ranks send that a plan has no formula for, as of weights that hooks between steps read: counted in dry runs."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.messages.stored_parts import stored_rests
from lightning_par.planner.recording.batch_sizes import first_samples
from lightning_par.planner.recording.given_batch import Given
from lightning_par.planner.recording.profile import Profile

if TYPE_CHECKING:
    from lightning_par.dry.counts import Counts

MOST = 4000
"""Functions that dry runs of one plan run, some minute of one core: layouts that take more are left to formulas."""

AXES = {
    "gradients": "data", "data": "data", "stage": "data",
    "tensor": "tensor", "sequence": "sequence", "pipeline": "pipeline",
}  # fmt: skip
"""Axes of the ledger, as a plan names them."""

APART = frozenset(
    (
        "batch", "log", "logged", "effects", "headers", "flags", "metrics", "microbatches", "has_batch", "views",
        "order", "gradient flags",
    )
)  # fmt: skip
"""Purposes of messages that are no matter of a layout."""

RankPlace = tuple[int, int, int]
"""Indices of a rank along pipeline, tensor, and data and sequence together."""

SentAt = Callable[..., Mapping[str, float] | None]
"""Bytes that the rank at a `RankPlace` sends, by axis; None where that is left to formulas."""


def by_axis(sent: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Bytes by the ledger's axes and purposes, as a plan has them."""
    found = dict.fromkeys(("data", "pipeline", "sequence", "tensor"), 0.0)
    for (axis, purpose), size in sent.items():
        if axis in AXES and purpose not in APART:
            found[AXES[axis]] += size
    return found


@dataclass(frozen=True, eq=False)
class Alike:
    """Which ranks of a layout send as much.

    Args:
        profile: of the step, cut as the layout does.
        one: the layout.
        tokens: whether ranks along tensor have as many tokens each.
        sequences: whether those along sequence do.

    Example::

        assert Alike(profile, one)(pipeline, tensor, replica=7) == (pipeline, tensor, 0)
    """

    profile: Profile
    one: Candidate
    tokens: bool = True
    sequences: bool = True

    def __call__(self, pipeline: int, tensor: int, replica: int) -> RankPlace:
        """The first rank that has as much of every parameter as the one there, and of every sequence."""
        layout, stages = self.one.layout, self.profile.stages
        if self.tokens:
            tensor = self.profile.alike[tensor]
        own = stages.by_rank(self.one.schedule, layout.pipeline)[pipeline]
        smaller = stored_rests(stages, tuple(own), tensor, layout.data * layout.sequence) if self.one.stored else ()
        first = max((rank for rank in smaller if rank <= replica), default=0)
        return pipeline, tensor, first + (replica - first) % (1 if self.sequences else layout.sequence)


@dataclass(eq=False)
class DryRuns:
    """Those of one plan.

    Args:
        module: as the plan was given it.
        given: the batch, likewise.
        samples: of it.
        precision: as the Trainer's.
        clip: of gradients: ``"norm"``, ``"value"`` or none.
        on_host: ranks of a host.
        functions: of the step.

    Attributes:
        counted: of how many ranks something was counted.
        failed: why layouts were left to formulas.
        left: functions that others may run.
    """

    module: Any
    given: Given
    samples: int
    precision: str | int
    clip: str
    on_host: int
    functions: int
    counted: int = 0
    failed: dict[str, None] = field(default_factory=dict)
    left: float = MOST
    _known: dict[Any, Mapping[RankPlace, dict[str, float]] | None] = field(default_factory=dict)

    def sent(self, one: Candidate, stages: Any, alike: Alike, *place: int) -> Mapping[str, float] | None:
        """What the rank of ``one`` at ``place`` sends, by axis; None where it is left to formulas.

        Args:
            one: the layout.
            stages: where it is cut, if that is asked for.
            alike: of its ranks.
            place: indices along pipeline, tensor, and data and sequence together.
        """
        key = one, str(stages)
        if key not in self._known:
            self._known[key] = self._counted(one, stages, alike)
        known = self._known[key]
        return None if known is None else known[alike(*place)]

    def _counted(self, one: Candidate, stages: Any, alike: Alike) -> dict[RankPlace, dict[str, float]] | None:
        """Of each rank that is unlike those before it; None where one can't be run."""
        layout = one.layout
        replicas = range(layout.data * layout.sequence)
        places = {alike(p, t, r): None for p in range(layout.pipeline) for t in range(layout.tensor) for r in replicas}
        each = self.functions * (1 + one.microbatches * one.accumulated / layout.pipeline)
        why = self._hinders(one)
        if not why and each * len(places) > self.left:
            why = f"of {layout} they would run {each * len(places):,.0f} functions, where they may run {MOST:,}"
        if why:
            self.failed[why] = None
            return None
        self.left -= each * len(places)
        try:
            found = {place: by_axis(self._run(one, stages, place).sent) for place in places}
        except Exception as error:  # whatever the user's code raises, or a layout that a run refuses
            self.failed[f"of {layout} they raise {type(error).__name__}: {str(error).strip().splitlines()[0]}"] = None
            return None
        self.counted += len(places)
        return found

    def _hinders(self, one: Candidate) -> str:
        """Why a dry run is another one than what is planned; empty where it is not."""
        if dist.is_initialized():
            return "this process is a rank of a run"
        if one.contiguous or "stages_per_rank" in one.arguments():
            return "this package runs no such layout"
        samples = one.micro * one.microbatches
        if samples > self.samples or samples != round(samples):
            return "the batch that was given is another one than a replica's"
        return ""

    def _run(self, one: Candidate, stages: Any, place: RankPlace) -> Counts:
        from lightning_par.dry.run import DryRank, run_rank  # which takes some of the planner

        pipeline, tensor, replica = place
        layout = one.layout
        data, sequence = divmod(replica, layout.sequence)
        arguments = one.arguments()
        if one.stored:
            arguments["reshard_after_forward"] = one.reshard
        if stages is not None:
            arguments["stages"] = stages
        devices, rank = layout.world_size, int(layout.grid()[data, pipeline, sequence, tensor])
        asked = DryRank(
            rank, devices, self.on_host if devices % min(devices, self.on_host) == 0 else devices, arguments,
            self.precision, one.accumulated, 1.0 if self.clip else None, self.clip or None, saves=False,
        )  # fmt: skip
        level = logging.root.manager.disable
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)  # what a run says as it starts
            try:
                return run_rank(self.module, self._batch(round(one.micro * one.microbatches)), asked)
            finally:
                logging.disable(level)
                gc.collect()  # a Trainer and its module hold each other

    def _batch(self, samples: int) -> Given:
        batch = self.given.batch
        batch = batch if samples == self.samples else first_samples(batch, samples, self.samples)
        return Given(batch, self.given.data)
