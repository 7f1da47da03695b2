"""Advice of Lightning's that does not hold here is not given."""

from __future__ import annotations

import warnings
from typing import Any

SYNC = r"It is recommended to use `self\.log\(.*sync_dist=True"
"""Given wherever there are processes; those of one replica log equal values."""

RESUMABLE_LOADER = r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is"
"""Given of a loader that has no state; what it has given before is let go here, and no state is needed."""


class Advice:
    """A filter of warnings, which a filter of the user's own goes before that is set later.

    Args:
        begins: a pattern of how the advice begins.
    """

    def __init__(self, begins: str) -> None:
        self._begins = begins
        self._filter: Any = None

    def install(self) -> None:
        before = [*warnings.filters]
        warnings.filterwarnings("ignore", message=self._begins)
        self._filter = None if warnings.filters[0] in before else warnings.filters[0]  # the user's own, if it was there

    def undo(self) -> None:
        # A list: whoever caught warnings meanwhile may have put another one there, without it.
        warnings.filters[:] = [x for x in warnings.filters if x is not self._filter]  # type: ignore[index]
        self._filter = None
