"""A StopIteration of the user's, which Lightning's loops take for the end of the data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_par.mesh.handshake import Meeting

_ADVICE = "Raise it on all ranks alike, or use `self.trainer.should_stop`."


class Stopping(AbstractContextManager[None]):
    """Inside, a StopIteration is an error where there is a reason against it.

    Args:
        reason: given what was raised, why the loop must not end by it, if so.

    Example::

        with Stopping(lambda error: "The others wait."):
            next(iter([]))  # RuntimeError: The others wait.
    """

    def __init__(self, reason: Callable[[StopIteration], str | None]) -> None:
        self._reason = reason

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, StopIteration):
            reason = self._reason(error)
            if reason is not None:
                raise RuntimeError(reason)  # not `from error`: a generator around this would make that of it again


class AllStop:
    """Whether the ranks that run the same steps stop together; the loop of one alone would leave the others waiting.

    Args:
        meeting: of these ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._met: StopIteration | None = None

    def __call__(self, error: StopIteration) -> str | None:
        """Why the loop must not end by ``error``, if so: a rank does not raise it, too."""
        if error is self._met:  # on its way out of steps within each other
            return None
        self._met = error
        try:
            self._meeting("raised StopIteration in a step, which ends Lightning's loop", _ADVICE)
        except RuntimeError as alone:
            return str(alone)
        return None
