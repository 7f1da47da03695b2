"""How layers are to lie on the ranks of the pipeline axis: in rows of stages, or placed."""

from __future__ import annotations

from typing import Any, Literal

from lightning_par.pipeline.placement.settings import Placed, PlacementSettings
from lightning_par.pipeline.plan.settings import Settings
from lightning_par.pipeline.plan.user_stages import Wishes


def settings_of(
    schedule: str,
    microbatches: int | Literal["auto"],
    stages: Wishes | None,
    placement: Placed | None,
    max_memory: dict[int, int | str] | None,
    allow_batch_coupling: bool,
    asker: str,
) -> Settings | PlacementSettings:
    """The settings of a pipeline, or those of a placement where there is one.

    Args:
        schedule: a pipeline's.
        microbatches: into how many a batch is cut, or ``"auto"``.
        stages: a pipeline's.
        placement: None for a pipeline.
        max_memory: a placement's.
        allow_batch_coupling: whether microbatches may be trained as batches of their own.
        asker: the strategy's name, for messages.

    Raises:
        ValueError: an argument of the one is given beside the other, or is none.
        TypeError: an argument is of another type than those it may have.

    Example::

        assert settings_of("1f1b", "auto", None, {"fc1": 0, "fc2": 1}, None, False, "Mine").named == 2
    """
    if placement is None:
        if max_memory is not None:
            raise ValueError(
                "max_memory goes with a placement. Write placement='balanced' to have layers placed by it."
            )
        return Settings(schedule, microbatches, stages, allow_batch_coupling, asker)
    Settings(schedule)  # is it one at all
    if stages is not None or schedule != "1f1b":
        other = f"stages={stages!r}" if stages is not None else f"schedule={schedule!r}"
        raise ValueError(f"{other} and placement={placement!r} both say where layers run. Leave one of them out.")
    return PlacementSettings(placement, microbatches, max_memory, allow_batch_coupling)


def check_reshard(asked: Any, data_parallel: str) -> None:
    """Refuse a ``reshard_after_forward`` that is none, or that nothing is sharded for.

    Raises:
        ValueError: it is neither a bool nor ``"auto"``, or is given beside ``data_parallel="ddp"``.
    """
    if not isinstance(asked, bool) and asked != "auto":
        raise ValueError(f"reshard_after_forward must be True, False or 'auto', got {asked!r}.")
    if asked != "auto" and data_parallel != "fsdp":
        raise ValueError(
            f"reshard_after_forward={asked} goes with data_parallel='fsdp', but this is {data_parallel!r}: every rank "
            "keeps its weights whole. Write data_parallel='fsdp', or leave it out."
        )
