"""The ranks of a run are told to stop, and where: a `StopLine` and the messages that draw it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.side_channel import Line, SideChannel
from lightning_par.mesh.stop_line import ENDED, Point, StopLine

_PATIENCE = 5.0  # seconds: a thread answers, whatever the rank's own code does
_HASTE = 1.0  # seconds, where a process is about to end
_AT_ONCE = 32  # ranks that are asked at one time
_PAUSE = 0.1  # seconds


@dataclass(frozen=True)
class Request:
    """Why all ranks are to stop, alike on all of them."""

    signum: int
    rank: int
    """The one that received the signal."""
    seconds: float
    """How long there is until all must have ended."""


class Stopping:
    """One rank's side of stopping together. All ranks make one, with the same name.

    The first rank asks all others; who has received a signal asks the first rank. Threads send and answer, so that it
    is settled in milliseconds, whatever the ranks' own code does or waits for.

    Args:
        world: all ranks of the run.
        name: used once in a job.
        seconds: called in a thread on the first rank: how long there is after a signal with this number, that came now.
        told: called in a thread, once, when this rank knows that all are to stop.
        end: called in a thread with a signal's number: this process is to end at once.

    Example::

        stopping = Stopping(groups.world, "signals 3", seconds=lambda number: 30.0, told=print, end=os._exit)
        stopping.ask(Request(signal.SIGTERM, 0, 30.0))
        while not stopping.arrive(of_all=True):
            train_a_batch()
        stopping.close()
    """

    def __init__(
        self,
        world: Axis,
        name: str,
        seconds: Callable[[int], float],
        told: Callable[[Request], None],
        end: Callable[[int], None],
    ) -> None:
        self.request: Request | None = None
        """What this rank was told, if it was."""
        self.silent: list[int] = []
        """On the first rank, those that have not answered."""
        self._ranks, self._me = world.ranks, world.ranks[world.rank]
        self._seconds, self._told, self._end = seconds, told, end
        self._line = StopLine()
        self._changed = threading.Condition()
        self._round: threading.Thread | None = None
        self._ended = self._closed = False
        self._channel: SideChannel | None = None
        if world.size > 1:
            self._channel = SideChannel(name, self._me, self._answer)
            # Now, and not when there is a signal: the store's client serves one thread at a time, which may wait.
            for rank in self._ranks[1:] if self._me == self._ranks[0] else self._ranks[:1]:
                self._channel.look_up(rank)

    def arrive(self, of_all: bool) -> bool:
        """This rank has come to the next point; True where all stop at it. Waits where that is being settled.

        Args:
            of_all: whether all ranks come to it, or those of a replica alone.
        """
        with self._changed:
            self._line.arrive(of_all)
            while (stops := self._line.stops()) is None:
                self._changed.wait()
        return stops

    def ask(self, request: Request) -> None:
        """Have all ranks stop.

        Raises:
            RuntimeError: the first rank, which is to tell the others, does not answer.
        """
        if self._me == self._ranks[0]:
            self._settle(request)
        else:
            self._tell(self._ranks[0], {"stop": asdict(request)}, _PATIENCE)

    def ask_to_end(self, signum: int) -> None:
        """Have all other ranks end at once, where they can be reached."""
        if self._me == self._ranks[0]:
            self._tell_all({"end": signum}, _HASTE)
        else:
            try:
                self._tell(self._ranks[0], {"end": signum}, _HASTE)
            except RuntimeError:  # it ends by itself, as this one does
                pass

    def close(self) -> None:
        """The run has ended on this rank."""
        with self._changed:
            self._ended = True
        if self._round is not None and self._round is not threading.current_thread():
            self._round.join(_PATIENCE)  # others wait for the line
        self._closed = True
        if self._channel is not None:
            self._channel.close()

    def _answer(self, question: Any, line: Line) -> None:
        """Called in a thread for each question of another rank."""
        if "stop" in question:
            line.say(None)
            self._settle(Request(**question["stop"]))
        elif "tell" in question:
            line.say(self._be_told(Request(**question["tell"])))
        elif "line" in question:
            self._be_drawn(tuple(question["line"]))
            line.say(None)
        else:
            line.say(None)
            if self._me == self._ranks[0]:
                self._tell_all({"end": question["end"]}, _HASTE)
            self._end(question["end"])

    def _settle(self, request: Request) -> None:
        """On the first rank: tell all, once."""
        with self._changed:
            if self._round is not None or self._ended:
                return
            self._round = threading.Thread(target=self._run_round, args=(request,), name="stopping", daemon=True)
        self._round.start()

    def _run_round(self, request: Request) -> None:
        if request.rank != self._me:
            request = replace(request, seconds=self._seconds(request.signum))
        name = signal_name(request.signum)
        print(
            f"Rank {request.rank} received {name}: all ranks end where the run can be resumed from, within "
            f"{request.seconds:.0f} s. A second {name} ends them at once.",
            file=sys.stderr,
            flush=True,
        )
        entered = [self._be_told(request)]
        told = self._tell_all({"tell": asdict(request)}, _PATIENCE)
        entered += [ENDED if answer is None else tuple(answer) for answer in told]
        if not self.silent:
            line = max(entered)
            self._be_drawn(line)
            self._tell_all({"line": line}, _PATIENCE)

    def _be_told(self, request: Request) -> Point:
        with self._changed:
            first = self.request is None
            self.request = self.request or request
            entered = self._line.tell()
        if first:
            self._told(request)
        return entered

    def _be_drawn(self, line: Point) -> None:
        with self._changed:
            self._line.draw(line)
            self._changed.notify_all()

    def _tell_all(self, message: Any, patience: float) -> list[Any]:
        """The answers of all other ranks, None where a rank's run has ended."""
        others = [rank for rank in self._ranks if rank != self._me]
        if not others:
            return []
        with ThreadPoolExecutor(min(_AT_ONCE, len(others))) as pool:
            return [*pool.map(lambda rank: self._tell_surely(rank, message, patience), others)]

    def _tell_surely(self, rank: int, message: Any, patience: float) -> Any:
        """What ``rank`` answers, None where its run has ended; in `silent`, as long as it does not answer."""
        end = time.monotonic() + (self.request.seconds if self.request and patience > _HASTE else patience)
        while not self._closed:
            try:
                answer = self._tell(rank, message, patience)
            except RuntimeError as error:
                if isinstance(error.__cause__, ConnectionRefusedError):
                    return None
                if rank not in self.silent:
                    self.silent.append(rank)
                if time.monotonic() > end:
                    return None
                time.sleep(_PAUSE)
            else:
                if rank in self.silent:
                    self.silent.remove(rank)
                return answer
        return None

    def _tell(self, rank: int, message: Any, patience: float) -> Any:
        assert self._channel is not None
        with self._channel.ask(rank, message, patience) as line:
            return line.hear()


def signal_name(signum: int) -> str:
    """As "SIGTERM"."""
    import signal

    return signal.Signals(signum).name if signum in {*signal.Signals} else f"signal {signum}"
