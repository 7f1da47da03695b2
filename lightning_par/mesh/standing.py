"""Where a rank's own code stands, for a thread of its process that answers other ranks meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import FrameType

from lightning_par.mesh.handshake import PATIENCE
from lightning_par.private.threads import frame_of

_WAITS = ("torch.distributed", "lightning_par.mesh")  # modules whose functions wait for other ranks
_NEAR = 4  # frames: torch wraps its collectives in as many
_STILL = 0.002  # seconds
_PATIENCE = 1.0  # seconds


class Standing:
    """How many steps a rank is through, and whether its own code waits for others.

    Steps are those that all ranks run alike, so equal counts on two ranks mean the same moment of the run: neither can
    end the next step, and so change a weight in it, without the other.

    Example::

        standing = Standing()
        with standing.step():
            loss = module.training_step(batch, 0)
        assert standing.steps == 1 and not standing.inside
    """

    def __init__(self) -> None:
        self.steps = 0
        """Steps that ended."""
        self.inside = 0
        """Steps that run, one within the other."""
        self.writes = 0
        """How often code between steps has written to weights since the last one, alike on ranks at one place of it."""
        self._counts = True
        self._thread = threading.get_ident()
        self._granted = -1

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.steps += 1
            self.writes = 0

    def wrote(self) -> None:
        """To be called where a weight is written to; in steps it does not count."""
        if self._counts and not self.inside:
            self.writes += 1

    @contextlib.contextmanager
    def writes_once(self) -> Iterator[None]:
        """Around a function that writes, which counts once, whatever it calls on a rank that has parts."""
        self.wrote()
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def rests(self) -> bool:
        """Whether this rank's own code waits for another rank, as far as it can be seen."""
        before = self._place()
        if before is None:
            return False
        time.sleep(_STILL)
        return self._place() == before

    def wait_at(self, steps: int, writes: int) -> Iterator[None]:
        """Come back, again and again, until the rank is where another is, and changes no weight meanwhile.

        Code between two steps may run for long, or wait for what the asking rank is to do, as for its file: it is given
        a second.

        Args:
            steps: through how many the other rank is.
            writes: as `writes` there.

        Raises:
            RuntimeError: this rank has gone on, or the other has written to weights by itself.
        """
        before, since = None, time.monotonic()
        while True:
            now = self.steps, self.writes, self.inside
            self._refuse_later(steps, writes)
            if now[:2] == (steps, writes) and (self._granted == steps or self.rests()):
                if (self.steps, self.writes) == (steps, writes):  # still
                    return
            if now != before or self.steps != steps:
                before, since = now, time.monotonic()
            waited = time.monotonic() - since
            if waited > _PATIENCE and now == (steps, writes, 0):
                self._granted = steps
                return
            if waited > _PATIENCE and self.writes < writes and (waited > PATIENCE.total_seconds() or self.rests()):
                raise RuntimeError(
                    "the rank that asks has written to weights which this one has not, in code that it ran alone. "
                    "Write to them on all ranks: what follows would differ, too"
                )
            time.sleep(_STILL)
            yield

    def _refuse_later(self, steps: int, writes: int) -> None:
        if self.steps > steps:
            raise RuntimeError(f"it has gone on, to step {self.steps + 1} of the run, from step {steps + 1}")
        if self.steps == steps and self.writes > writes:
            raise RuntimeError(
                "it has gone on, and has written to weights. Where one rank alone reads them, as to save them, and "
                "code behind that writes, let the others wait: `self.trainer.strategy.barrier()` before it writes"
            )

    def _place(self) -> tuple[int, int] | None:
        """The innermost function, and where in it, if it waits for other ranks."""
        frame: FrameType | None = frame_of(self._thread)
        if frame is None:
            return None
        place = id(frame), frame.f_lasti
        for _ in range(_NEAR):
            if frame is None:
                return None
            if str(frame.f_globals.get("__name__", "")).startswith(_WAITS):
                return place
            frame = frame.f_back
        return None
