"""Regions of a step that its backward runs again, by `torch.utils.checkpoint`, where stages cut the step."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
"""The first event, and the one behind the last."""


def runs_as_one(region: Span, stage: Span, see_batch: Iterable[bool], in_parts: bool = False) -> bool:
    """Whether a stage runs a region again as one; else each of its units in it by itself, as in backward there are no
    values of other stages, and all of the batch.

    Args:
        region: the events of it.
        stage: those of the stage.
        see_batch: of the events of the region, where batches are cut, whether they are given what depends on the batch
            alone.
        in_parts: whether batches are cut, and the ranks of the stage share out the tokens of its residual stream: in
            backward, where no run takes a microbatch out of its batch, rules would meet these parts within it, and
            weights that are split beside them.
    """
    return stage[0] <= region[0] and region[1] <= stage[1] and not in_parts and not any(see_batch)
