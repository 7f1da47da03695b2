"""Lightning advises ``sync_dist=True`` wherever there are processes; those of one replica log equal values."""

from __future__ import annotations

import warnings
from typing import Any

_ADVICE = r"It is recommended to use `self\.log\(.*sync_dist=True"


class SyncAdvice:
    """A filter of warnings, which a filter of the user's own goes before that is set later."""

    def __init__(self) -> None:
        self._filter: Any = None

    def install(self) -> None:
        before = [*warnings.filters]
        warnings.filterwarnings("ignore", message=_ADVICE)
        self._filter = None if warnings.filters[0] in before else warnings.filters[0]  # the user's own, if it was there

    def undo(self) -> None:
        # A list: whoever caught warnings meanwhile may have put another one there, without it.
        warnings.filters[:] = [x for x in warnings.filters if x is not self._filter]  # type: ignore[index]
        self._filter = None
