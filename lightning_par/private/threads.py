"""What another thread of the process runs."""

from __future__ import annotations

import sys
from types import FrameType


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of the thread with this ident; None where it has ended. Python documents it under a name with
    an underscore, as other interpreters need not have it."""
    return sys._current_frames().get(thread)


def frames_of_all() -> dict[int, FrameType]:
    """The innermost frame of each thread that runs Python code, by its ident: those of autograd, too."""
    return sys._current_frames()
