"""What a rank tells of itself, and what the system tells of one that is silent."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_par import HybridParallelStrategy, TensorParallelStrategy
from lightning_par.hang_report.culprit import find
from lightning_par.hang_report.peers import Peer, ask_all, not_answering
from lightning_par.hang_report.processes import Process
from lightning_par.hang_report.rank_state import Operation, RankState, counts_of
from lightning_par.hang_report.report import Report
from lightning_par.hang_report.settings import seconds_until_report
from lightning_par.hang_report.stacks import Clock, stand
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.progress import Progress
from lightning_par.mesh.waits import wait_for
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.run.messages import Incoming


def child() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def process_of(pid: int) -> Process:
    own = Process.own()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        born = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19])
        if born:
            return replace(own, pid=pid, born=born)
    raise AssertionError


def test_a_process_has_ended_when_it_has_and_not_before() -> None:
    pid = child()
    try:
        process = process_of(pid)
        assert process.has_ended() is False
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert process.has_ended() is False and "SIGSTOP" in process.said() and f"kill -CONT {pid}" in process.said()
        os.kill(pid, signal.SIGKILL)
        while process.has_ended() is False:
            time.sleep(0.01)
        assert process.has_ended() and process.said() == ""  # nobody has waited for it yet
    finally:
        os.waitpid(pid, 0)
    assert process.has_ended()
    assert replace(Process.own(), born=1).has_ended(), "another process has its number"
    assert replace(process, machine="another host's").has_ended() is None


def test_of_a_rank_that_does_not_answer_no_more_is_said_than_is_known() -> None:
    own = Process.own()
    elsewhere = replace(own, machine="another host's")
    refused, late = ConnectionRefusedError(), TimeoutError()
    assert not_answering(1, Peer(None, own), late).answer == "silent"
    assert not_answering(1, Peer(None, own), refused).answer == "left"
    gone = not_answering(1, Peer(None, elsewhere), refused)
    assert gone.answer == "left" and "has ended, or" in gone.process
    assert not_answering(1, Peer(None, elsewhere), late).answer == "silent"
    assert not_answering(1, Peer(None, replace(own, born=1)), refused).answer == "ended"
    assert ask_all({0: Peer(None, own)}, [0], "?", 1.0, 1.0)[0].answer == "silent"


def test_a_state_travels_as_json() -> None:
    last = Operation("tensor", (0, 1), 3, "all_reduce", "leave", 64)
    state = RankState(1, waits=True, last=last, counts={"tensor|0, 1": 3}, sent={("pipeline 0, 1", 0): 2}, busy=0.5)
    assert RankState.from_json(json.loads(json.dumps(state.to_json()))) == state
    for wrong in ({}, {**state.to_json(), "counts": [1]}, {**state.to_json(), "more": 1}):
        with pytest.raises((TypeError, ValueError, KeyError)):
            RankState.from_json(wrong)


def test_what_a_rank_begins_is_counted_by_axis() -> None:
    progress, group = Progress(), dist.ProcessGroup(dist.HashStore(), 0, 2)
    progress.begin()
    axis, pretends = Axis("tensor", (4, 5), 1, group), Axis("tensor", (4, 5), 1, None)
    progress.end()
    assert Progress.current is not progress and axis.progress is progress
    pretends._log("all_reduce", "leave", 64, 256)
    axis._log("all_reduce", "leave", 64, 256)
    axis._log("all_reduce", "enter", 64, 256)
    told = counts_of(progress)
    assert told["counts"] == {"tensor|4, 5": 2}
    assert str(told["last"]) == "all_reduce 'enter' of 64 elements (tensor 4, 5, number 2)"
    progress.come("barrier", (4, 5), "came to a barrier")
    progress.event = Action("F", 1, 3)
    told = counts_of(progress)
    assert str(told["last"]) == "came to a barrier" and told["event"] == "the forward of stage 1, microbatch 3"


class _Never:
    """A work that a test ends; its wait is no function of Python's, as that of a true one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.wait, self.end = self._lock.acquire, self._lock.release


def standing_in(function: Any, *args: Any) -> tuple[Any, threading.Thread]:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    time.sleep(0.2)
    return stand(thread.ident or 0, 0.0), thread


def _sleeps(seconds: float) -> None:
    time.sleep(seconds)


def test_where_a_thread_stands_is_told() -> None:
    told, thread = standing_in(_sleeps, 0.5)
    assert not told.waits and "test_states.py" in told.place and told.place.endswith(" in _sleeps")
    assert told.doing == "sleeps, or waits for something that is no rank" and "time.sleep(seconds)" in told.stack
    thread.join()
    assert stand(thread.ident or 0).place == ""


def test_a_wait_for_other_ranks_is_seen() -> None:
    work: Any = _Never()
    told, thread = standing_in(wait_for, work, Incoming((4,), torch.float32, 1, "forward", 0))
    work.end()
    thread.join()
    assert told.waits and told.doing == "waits: Receiving activations from pipeline rank 1"
    store = dist.HashStore()
    late = partial(store.wait, ["never"], timedelta(seconds=0.5))
    told, thread = standing_in(lambda: pytest.raises(dist.DistStoreError, late))
    thread.join()
    assert not told.waits, "a store of the user's own"


def test_a_clock_tells_who_computes() -> None:
    clock = Clock(threading.current_thread())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert (clock.busy() or 0.0) > 0.2 or clock.busy() is None
    clock.start()
    time.sleep(0.2)
    assert (clock.busy() or 0.0) < 0.2


AT_FAULT: dict[str, dict[str, Any]] = {
    "which sleeps at a.py:3 (pid 7 on host1), for 9 s": {"doing": "sleeps", "place": "a.py:3"},
    "whose process (pid 7 on host1) has ended": {"answer": "ended"},
    "which does not answer (pid 7 on host1): its process is stopped": {"answer": "silent", "process": "stopped"},
    "which has left the run (pid 7 on host1): its process still runs": {
        "answer": "left",
        "process": "its process still runs",
    },
    "which waits at a.py:3 (pid 7 on host1), to which no other rank has come": {
        "waits": True,
        "doing": "waits",
        "place": "a.py:3",
    },
}


@pytest.mark.parametrize("text", AT_FAULT)
def test_the_report_says_who_and_where_in_one_line(text: str) -> None:
    ahead = [RankState(rank, waits=True, still=9.0, doing="waits", counts={"tensor|0-2": 5}) for rank in (0, 2)]
    culprit = RankState(1, host="host1", pid=7, still=9.0, **AT_FAULT[text])
    states = (ahead[0], culprit, ahead[1])
    finding = find(states, 5.0)
    assert finding is not None
    report = Report(states, finding, 5.0, 60.0, "host0:4000", datetime.now(timezone.utc), "there.txt")
    assert report.conclusion == f"Likely culprit: rank 1, {text}"
    shown = str(report.with_stacks({1: replace(culprit, stack="  File a.py, line 3\n")}))
    assert "Ranks 0, 2: waits for rank 1, for 9 s" in shown  # those alike once
    assert "Python stack of rank 1:\n  File a.py, line 3" in shown
    assert "stacks host0:4000" in shown and "there.txt" in shown and "after 60 s" in shown


def test_the_time_until_a_report_is_shorter_than_the_timeout() -> None:
    minutes = timedelta(minutes=1)
    assert seconds_until_report("auto", timedelta(minutes=30)) == 300.0 == seconds_until_report("auto", None)
    assert seconds_until_report("auto", minutes) == 30.0
    assert seconds_until_report(minutes, None) == 60.0 and seconds_until_report(None, minutes) is None
    with pytest.raises(ValueError, match="is 60 s, but after timeout=60 s .* Write hang_report_after=30 or less"):
        TensorParallelStrategy(timeout=minutes, hang_report_after=60)
    for wrong in ("soon", True, 0, -1.0, float("nan"), timedelta(0)):
        with pytest.raises(ValueError, match="hang_report_after="):
            HybridParallelStrategy(hang_report_after=wrong)  # type: ignore[arg-type]
