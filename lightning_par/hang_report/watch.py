"""Watches a rank of a run, and has one rank report when the run stands still.

A thread looks at what the rank has begun last. If that has not changed for long, the lowest rank that answers asks all
others where they are. Each answers from a thread, whatever its own code does: no process group and no store is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_par.hang_report.culprit import find
from lightning_par.hang_report.peers import Peer, ask_all
from lightning_par.hang_report.processes import Process
from lightning_par.hang_report.rank_state import RankState, counts_of, named
from lightning_par.hang_report.report import Report
from lightning_par.hang_report.stacks import Clock, stand
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import number_of
from lightning_par.mesh.progress import Begun, Progress
from lightning_par.mesh.side_channel import Line, SideChannel
from lightning_par.private.process_groups import tells_of_a_lost_peer

_PATIENCE = 4.0  # seconds for an answer: a thread that computes in Python lets others have a turn every 5 ms
_MOST = 20.0  # seconds for those of all ranks
_TICK = 1.0  # seconds between two looks, at most
_APART = 0.002  # seconds by which a rank is later than the one before it: one that is asked meanwhile need not ask
_NEAREST = 8  # ranks that are asked about an error


@dataclass(frozen=True)
class Watched:
    """What a watch must know of the run.

    Attributes:
        after: seconds that a rank waits until it is reported.
        timeout: the process group's, in seconds; None where it is torch's own default.
        phase: says where in the run this rank is, in words.
        folder: where a report is written to.
        surely: whether a stack shows all waits; a GPU's host waits where it doesn't.
    """

    after: float
    timeout: float | None
    phase: Callable[[], str]
    folder: Callable[[], str]
    surely: bool = True


class HangWatch:
    """The watch of one rank from the beginning of a run to its end; made on all ranks together.

    Args:
        world: all ranks.
        run: what it must know of the run.
        progress: what this rank has begun.

    Example::

        watch = HangWatch(groups.world, Watched(300.0, 1800.0, lambda: "training", os.getcwd), Progress.current)
        print(watch.address)
        watch.close()
    """

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A strategy that is copied has no run."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nor has one that is saved."""
        return type(None), ()

    def __init__(self, world: Axis, run: Watched, progress: Progress) -> None:
        self._rank, self._run, self._progress = world.ranks[world.rank], run, progress
        self._own = threading.current_thread()
        self._process = Process.own()
        self._clock = Clock(self._own)
        self._seen: Begun | None = progress.last
        self._since = time.monotonic()
        self._due = self._since + run.after
        self._quiet_until = 0.0  # another rank that has asked this one is about a report
        self._conclusion = ""  # of the report of what this rank stands in
        self._reported: tuple[int, ...] = ()  # by this rank, in what it stands in
        self._wanted, self._ended, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._stranger = threading.Lock()
        name = f"hangs {number_of(world, 'hangs')}"
        self._channel: SideChannel | None = None
        with contextlib.suppress(OSError):
            self._channel = SideChannel(name, self._rank, self._answer, self._answer_stranger)
        told = world.all_gather_object((self._address, dataclasses.astuple(self._process)), "addresses")
        self._peers = {rank: Peer(address, Process(*process)) for rank, (address, process) in zip(world.ranks, told)}
        self._thread = threading.Thread(target=self._watch, name="lightning_par hang report", daemon=True)
        self._thread.start()

    @property
    def _address(self) -> tuple[str, int, str] | None:
        return None if self._channel is None else self._channel.address

    @property
    def address(self) -> str:
        """Where this rank answers questions: "host:port"."""
        return "nowhere" if self._address is None else f"{self._address[0]}:{self._address[1]}"

    def close(self) -> None:
        """The run has ended."""
        self._ended.set()
        self._wake.set()
        self._thread.join()
        if self._channel is not None:
            self._channel.close()

    def explain(self, error: BaseException) -> None:
        """Add to the message of ``error``, with which the run ends, who is the culprit, where another rank is."""
        causes, cause = [error], error.__cause__
        while cause is not None and cause not in causes:
            causes.append(cause)
            cause = cause.__cause__
        text = error.args[0] if error.args else None
        if not any(map(tells_of_a_lost_peer, causes)) or not isinstance(text, str):
            return
        error.args = (f"{text}\n{self._conclusion or self._look_around()}", *error.args[1:])

    # ------------------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        tick = min(_TICK, self._run.after / 8)
        while not self._ended.is_set():
            began = time.monotonic()
            self._wake.wait(tick)
            self._wake.clear()
            self._look(was_stopped=time.monotonic() - began > tick + 0.5 * self._run.after)
            if self._ended.is_set():
                return
            if self._wanted.is_set() or time.monotonic() >= self._due:
                self._due = time.monotonic() + self._run.after
                self._see_to_a_report()

    def _look(self, was_stopped: bool) -> None:
        """Note since when nothing was begun. A process that was stopped begins anew: the others wait for it."""
        last = self._progress.last
        if last is not self._seen or was_stopped:
            self._seen, self._since = last, time.monotonic()
            self._due, self._conclusion, self._reported = self._since + self._run.after, "", ()
            self._clock.start()

    def _see_to_a_report(self) -> None:
        if not self._wanted.is_set():
            if self._conclusion or self._ended.wait(min(_APART * self._rank, 2.0)):
                return
            if self._is_quiet() or self._hand_over():
                return
        try:
            self._report()
        except Exception as error:  # a thread's traceback would be no report either
            print(f"lightning_par: no hang report could be made: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            self._wanted.clear()  # also by those that asked meanwhile

    def _is_quiet(self) -> bool:
        """Whether another rank is about a report, or has made one."""
        return bool(self._conclusion) or time.monotonic() < self._quiet_until

    def _hand_over(self) -> bool:
        """Ask the ranks before this one to report, from the first on; whether one will, or another does."""
        silent: set[str] = set()
        for rank in range(self._rank):
            peer = self._peers[rank]
            if peer.process.machine in silent and peer.process.machine != self._process.machine:
                continue  # one rank a host that does not answer is enough
            try:
                peer.ask({"ask": "report"}, _PATIENCE, confirm=lambda: not self._is_quiet())
                return True
            except OSError:
                silent.add(peer.process.machine)
            if self._ended.is_set() or self._is_quiet():
                return True
        return False

    def _report(self) -> None:
        states = self._states({"ask": "state", "reporting": self._rank})
        try:
            self._make(states)
        finally:
            told = {"ask": "state", "conclusion": self._conclusion}
            self._states(told, [rank for rank, state in states.items() if _answers(state)])

    def _make(self, states: dict[int, RankState]) -> None:
        """Make the report of ``states``, unless no rank waits or there is one already."""
        finding = find(list(states.values()), 0.9 * self._run.after)
        if finding is None or self._ended.is_set() or self._reported == finding.culprits:
            return
        ordered = tuple(states[rank] for rank in sorted(states))
        now = datetime.now(timezone.utc)
        report = Report(ordered, finding, self._run.after, self._run.timeout, self.address, now)
        asked = [rank for rank in report.shown if states[rank].answer == "answers"]
        report = report.with_stacks(self._states({"ask": "stack"}, asked))
        if self._conclusion and not self._reported:  # another rank, to which this one seemed not to answer, was faster
            return
        file = self._file(now)
        report = dataclasses.replace(report, file=file)
        self._reported, self._conclusion = finding.culprits, report.conclusion
        self._write(str(report), file)

    def _states(self, question: Any, ranks: list[int] | None = None) -> dict[int, RankState]:
        return ask_all(self._peers, self._peers if ranks is None else ranks, question, _PATIENCE, _MOST)

    def _file(self, now: datetime) -> str:
        try:
            folder = Path(self._run.folder())
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"hang_report-{now:%Y%m%d-%H%M%S}-rank{self._rank}.txt"
            file.touch()
        except (OSError, ValueError, TypeError):  # a URL, or nowhere to write to
            return ""
        return str(file)

    def _write(self, text: str, file: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if file:
            with contextlib.suppress(OSError):
                Path(file).write_text(text)

    # ----------------------------------------------------------------------------------------------------- the answers

    def _answer(self, question: Any, line: Line) -> None:
        if question["ask"] == "report":
            line.say("yes")
            line.hear()  # else who asked has given up meanwhile, as where this process was stopped
            self._wanted.set()
            self._wake.set()
            return
        if "conclusion" in question:
            self._conclusion, self._quiet_until = str(question["conclusion"]), 0.0
        elif question.get("reporting", self._rank) != self._rank:  # no need to ask for a report
            self._quiet_until = time.monotonic() + 2 * _PATIENCE + _MOST
        line.say(self._state(question["ask"] == "stack").to_json())

    def _answer_stranger(self, question: Any, line: Line) -> None:
        """To who knows no secret the stacks are shown, and nothing else is done."""
        if question != "stacks":
            line.say({"failure": "the only question is 'stacks'"})
        elif not self._stranger.acquire(blocking=False):
            line.say({"failure": "it is busy with the same question; ask again"})
        else:
            try:
                states = self._states({"ask": "stack"})
            finally:  # before the answer, upon which it may be asked again
                self._stranger.release()
            line.say([states[rank].to_json() for rank in sorted(states)])

    def _state(self, with_stack: bool) -> RankState:
        moved = self._progress.last is not self._seen
        busy = None if moved else self._clock.busy()
        standing = stand(self._own.ident or 0, busy)
        return RankState(
            rank=self._rank,
            host=self._process.host,
            pid=self._process.pid,
            still=0.0 if moved else time.monotonic() - self._since,
            waits=standing.waits,
            surely=self._run.surely,
            doing=standing.doing,
            place=standing.place,
            phase=self._run.phase(),
            busy=busy,
            stack=standing.stack if with_stack else "",
            **counts_of(self._progress),
        )

    def _look_around(self) -> str:
        """What is known of the ranks with which this one last began something."""
        ranks = () if self._progress.last is None else self._progress.last[0][1]
        others = sorted((rank for rank in ranks if rank != self._rank), key=lambda rank: abs(rank - self._rank))
        states = ask_all(self._peers, others[:_NEAREST], {"ask": "state"}, _PATIENCE / 2, _PATIENCE)
        gone = [state for state in states.values() if not _answers(state)]
        if not gone:
            return f"{named(sorted(states))} still answer{'s' * (len(states) == 1)}.".capitalize() if states else ""
        words = {"ended": "its process has ended", "silent": "it does not answer", "left": "it has left the run"}
        return "; ".join(f"Rank {s.rank} (pid {s.pid} on {s.host}): {words[s.answer]}" for s in gone) + "."


def _answers(state: RankState) -> bool:
    return state.answer == "answers"
