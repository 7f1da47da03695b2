"""What the user asks of a pipeline, checked before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_par.mesh.layout import AxisName, Layout, Size
from lightning_par.pipeline.plan.schedule import place_stages, stages_per_rank
from lightning_par.pipeline.plan.user_stages import Wishes, check_wishes

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


@dataclass(frozen=True)
class Settings:
    """The arguments of a strategy that concern the pipeline axis.

    Args:
        schedule: its name.
        microbatches: into how many a batch is cut, or ``"auto"``.
        stages: the stage of each module, or cut points, or None.
        allow_batch_coupling: whether microbatches may be trained as batches of their own where samples need one
            another.
        asker: the strategy's name, for messages.
        preferred: the count that ``"auto"`` takes where samples don't need one another and a batch can be cut so.

    Raises:
        ValueError: the schedule is unknown, or the count is no positive int.
        TypeError: ``stages`` is of another type than those it may have.
    """

    schedule: str = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    stages: Wishes | None = None
    allow_batch_coupling: bool = False
    asker: str = "PipelineParallelStrategy"
    preferred: int | None = None

    def __post_init__(self) -> None:
        stages_per_rank(self.schedule)
        check_microbatches(self.microbatches)
        check_wishes(self.stages)

    def resolve(self, world_size: int, own: AxisName, **sizes: Size) -> Layout:
        """The layout, as `Layout.resolve` has it.

        Raises:
            ValueError: the sizes don't multiply to ``world_size``, or the schedule can't have the stages.
        """
        layout = Layout.resolve(world_size, own, **sizes)
        if layout.pipeline > 1:
            self.stage_count(layout.pipeline)
        return layout

    def stage_count(self, ranks: int) -> int:
        """Stages over all ranks: as many as ``stages`` names, or as the schedule has by itself.

        Raises:
            ValueError: the schedule can't have so many on so many ranks.
        """
        if self.stages is None:
            count = ranks * stages_per_rank(self.schedule)
        elif isinstance(self.stages, dict):
            count = max(self.stages.values(), default=0) + 1
        else:
            count = len(self.stages) + 1
        try:
            place_stages(self.schedule, ranks, count)
        except ValueError as error:
            if self.stages is None:
                raise
            raise ValueError(f"stages={self.stages!r} names {count} stages. {error}") from error
        return count


def check_microbatches(count: int | Literal["auto"]) -> None:
    """Raises ValueError where ``count`` is neither ``"auto"`` nor a positive int."""
    if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ValueError(f"microbatches must be a positive int or 'auto', got {count!r}.")
