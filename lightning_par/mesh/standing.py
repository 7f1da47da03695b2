"""Where a rank's own code stands, for a thread of its process that answers other ranks meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

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
        self.writes: Callable[[], int] = lambda: 0
        """How often code between steps has written to weights since the last one, alike on all ranks."""
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
            RuntimeError: this rank has gone on.
        """
        since = None
        while True:
            now, inside = self.steps, self.inside
            if now > steps:
                raise RuntimeError(f"it has gone on, to step {now + 1} of the run, from step {steps + 1}")
            wrote = self.writes()
            if now == steps and wrote > writes:
                raise RuntimeError(
                    "it has gone on, and has written to weights. Where one rank alone reads them, as to save them, and "
                    "code behind that writes, let the others wait: `self.trainer.strategy.barrier()` before it writes"
                )
            if wrote < writes:
                since = None
            elif now == steps and (self._granted == steps or self.rests()) and self.steps == steps:
                return
            if now == steps and wrote == writes and not inside:
                since = since or time.monotonic()
                if time.monotonic() - since > _PATIENCE:
                    self._granted = steps
                    return
            else:
                since = None
            time.sleep(_STILL)
            yield

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
