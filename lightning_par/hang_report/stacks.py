"""Where a thread's own code stands: its Python stack, the user's line in it, and what it does there."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType

from lightning_par.private.threads import frame_of, frames_of_all
from lightning_par.private.trainer import is_entry_point
from lightning_par.python_state.user_code import is_library

_DEEPEST = 40  # frames of a stack that is shown
# Modules whose functions wait for other ranks, the innermost first that knows for what.
_WRAPPERS = "torch.distributed.c10d_logger"
_WAITS = ("torch.distributed.distributed_c10d", _WRAPPERS, "torch.distributed.rendezvous",
          "lightning_par.mesh.", "lightning_par.strategies.end_of_run")  # fmt: skip
# What a function of a module is a part of, in words; the first that a stack, from its innermost frame, comes to.
_DOING = (
    ("torch.utils.data.", "waits for data of its DataLoader"),
    ("torch.distributed.checkpoint", "saves or loads a checkpoint"),
    ("lightning_par.checkpoint.", "saves or loads a checkpoint"),
    ("lightning.fabric.plugins.io.", "saves or loads a checkpoint"),
    ("lightning_fabric.plugins.io.", "saves or loads a checkpoint"),
    ("lightning_par.trial.", "looks at the step before training"),
    ("lightning_par.pipeline.trial.", "looks at the step before training"),
)
_IDLE = 0.2  # share of a core up to which code is taken not to compute


@dataclass(frozen=True)
class Standing:
    """Where a thread stands; see `RankState`."""

    waits: bool
    doing: str
    place: str
    stack: str


def stand(thread: int, busy: float | None = None) -> Standing:
    """Where the thread with this ident stands.

    Args:
        thread: its ident.
        busy: the share of a core that it has used lately.

    Example::

        assert "stand(" in stand(threading.get_ident()).stack
    """
    innermost = _telling(thread)
    if innermost is None:
        return Standing(False, "its thread has ended", "", "")
    frames = [*takewhile(lambda frame: not is_entry_point(frame), _outward(innermost))]
    waiting = innermost if _module(innermost).startswith(_WAITS) else None
    place = next((_place(frame) for frame in frames if not is_library(_module(frame))), None) or _place(
        next((frame for frame in frames if not _module(frame).startswith(("torch.", "lightning_par.mesh."))), innermost)
    )
    stack = "".join(traceback.format_stack(innermost)[-_DEEPEST:])
    return Standing(waiting is not None, _doing(frames, waiting, busy), place, stack)


def _telling(thread: int) -> FrameType | None:
    """The innermost frame of the thread, or of one that works for it while it waits: its backward's, on a GPU, or the
    one that writes a checkpoint in the background."""
    frame = frame_of(thread)
    within = [] if frame is None else [_module(f) for f in _outward(frame)][:8]
    if "lightning_par.checkpoint.background" in within:
        workers = [t.ident for t in threading.enumerate() if t.name.startswith("lightning_par-checkpoint")]
        return next((found for t in workers if t is not None and (found := frame_of(t)) is not None), frame)
    if within[:1] == ["torch.autograd.graph"]:  # threads that Python has not started are autograd's
        known = {t.ident for t in threading.enumerate() if not t.name.startswith("Dummy-")}
        return next((other for t, other in frames_of_all().items() if t not in known), frame)
    return frame


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _doing(frames: list[FrameType], waiting: FrameType | None, busy: float | None) -> str:
    if waiting is not None:
        return _waiting(frames, waiting)
    for frame in frames:
        for module, words in _DOING:
            if _module(frame).startswith(module):
                return words
    if busy is None:
        return "does something else"
    return f"computes ({busy:.0%} of a core)" if busy >= _IDLE else "sleeps, or waits for something that is no rank"


def _waiting(frames: list[FrameType], waiting: FrameType) -> str:
    about = waiting.f_locals.get("about")
    if about is not None:
        return f"waits: {getattr(about, 'what', about)}"
    # Of functions that call one another the outermost is the one that was called.
    calls = [*takewhile(lambda frame: _module(frame).startswith("torch."), frames)]
    names = [call.f_code.co_name for call in calls if _module(call) != _WRAPPERS]
    return f"waits in torch.distributed.{names[-1]}" if names else "waits"


class Clock:
    """How much of a core a thread has used since a moment.

    Example::

        clock = Clock(threading.current_thread())
        assert clock.busy() is None or clock.busy() <= 1.5
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.start()

    def start(self) -> None:
        """From now on."""
        self._began, self._used = time.monotonic(), self._now()

    def busy(self) -> float | None:
        """Seconds that it has used of each second since `start`; None where the system does not tell."""
        now, passed = self._now(), time.monotonic() - self._began
        return None if now is None or self._used is None or passed < 0.05 else (now - self._used) / passed

    def _now(self) -> float | None:
        if self._thread.ident is None or not self._thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
            return None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
