"""A trace as a file, as tables and as a picture, made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_par.__main__ import main
from lightning_par.mesh.recorder import Recorder
from lightning_par.trace.breakdown import BUBBLE, COMPUTE, EXPOSED, Window, breakdown, take_apart
from lightning_par.trace.chrome import KEY, read, write
from lightning_par.trace.picture import picture
from lightning_par.trace.profiled import Profiled, Ran, containing, joined
from lightning_par.trace.record import MOST_FUNCTIONS, Place, on_device, rank_trace
from lightning_par.trace.report import duration, report
from lightning_par.trace.spans import OTHER, Clock, Message, Piece, Prediction, RankTrace, Span, Trace

MS = 1_000_000


def _rank(rank: int, late: int) -> RankTrace:
    """Computes, and waits for a sum over both."""
    verb, peer = ("send", 1) if rank == 0 else ("recv", 0)
    messages = (
        Message("tensor", (0, 1), 7, "all_reduce", "leave", 4096, None, 20 * MS + late, 40 * MS),
        Message("pipeline", (0, 1), 3, verb, "activations", 512, peer, 50 * MS + late, None if rank else 51 * MS),
    )
    pieces = [Piece(0, 20 * MS + late, 40 * MS), Piece(1, 50 * MS + late, 60 * MS + 1)]
    step = take_apart(Window(2, 0, MS, 100 * MS + 3), [(2 * MS, 19 * MS)], pieces, hides=False)
    functions = (Span("aten::mm", 2 * MS, 19 * MS),)
    actions = (Span("F0.0", MS, 20 * MS),)
    return RankTrace(rank, "host0", rank, "cpu", (step,), messages, functions, actions)


PREDICTED = Prediction("H100", {COMPUTE: 0.017, BUBBLE: 0.002, EXPOSED + "data": 0.001}, ("eager",))


@pytest.fixture
def trace() -> Trace:
    clock = Clock(5 * MS, 40_000, 32)
    return Trace("pipeline 2", (_rank(0, 0), _rank(1, 5 * MS).shifted(clock)), 2, PREDICTED, ("a note",))


def test_what_is_written_is_read_as_it_was(trace: Trace, tmp_path: Path) -> None:
    write(trace, tmp_path / "new" / "a.json")
    found = read(tmp_path / "new" / "a.json")
    assert found == replace(trace, ranks=found.ranks) and found.ranks == trace.ranks
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    assert breakdown(found).lines == breakdown(trace).lines


def test_the_events_are_chromes(trace: Trace, tmp_path: Path) -> None:
    write(trace, tmp_path / "a.json")
    told: dict[str, Any] = json.loads((tmp_path / "a.json").read_text())
    events: list[dict[str, Any]] = told["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e", "s", "f"}
    timed = [event for event in events if event["ph"] != "M"]
    assert all(event["ts"] >= 0 and {"pid", "tid", "name"} <= event.keys() for event in timed)
    steps = [event for event in timed if event["name"] == "step 2"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in steps] == [(0, 0, 100000.003), (1, 5000, 100000.003)]
    # a track's slices lie within one another or apart
    for pid, tid in {(event["pid"], event["tid"]) for event in timed}:
        slices = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in timed if (e["pid"], e["tid"], e["ph"]) == (pid, tid, "X")
        )
        assert all(a[1] <= b[0] + 1e-9 or b[1] <= a[1] for a, b in zip(slices, slices[1:]))
    begun = {event["id"]: event for event in timed if event["ph"] == "b"}
    assert {event["id"] for event in timed if event["ph"] == "e"} == begun.keys() and len(begun) == 4
    (start,), (finish,) = ([e for e in timed if e["ph"] == kind] for kind in "sf")
    assert start["id"] == finish["id"] and start["ts"] <= finish["ts"] and (start["pid"], finish["pid"]) == (0, 1)


def test_the_table_has_measured_and_predicted_side_by_side(trace: Trace) -> None:
    text = report(trace)
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert text.startswith("step 2 of 2 ranks, pipeline 2\n")
    assert re.search(r"compute +17 ms +17\.0% +17 ms +1\.00$", rows["compute"])
    assert re.search(r"exposed communication: tensor +12\.5 ms +12\.5% +- +-$", rows["exposed communication: tensor"])
    assert re.search(r"exposed communication: data +0 us +0\.0% +1 ms +-$", rows["exposed communication: data"])
    assert re.search(r"step +100 ms +100\.0% +20 ms +0\.20$", rows["step"])
    assert "rank 0: one clock; rank 1: host0 by 32 pings, to 40 us" in text
    assert "note: a note" in text and "predicted for H100, assumed: eager" in text
    assert re.search(r"pipeline +activations +send +0\.5 +256", text)
    alone = report(replace(trace, prediction=None))
    assert "predicted" not in alone


def test_the_picture_has_a_row_a_rank(trace: Trace) -> None:
    text = picture(trace)
    ElementTree.fromstring(text)
    assert text.count(">rank ") == 2 and "milliseconds of step 2" in text
    assert "<title>compute: 17 ms</title>" in text and f"<title>{EXPOSED}tensor: 15 ms</title>" in text
    with pytest.raises(ValueError, match="no step to draw"):
        picture(Trace("x", (), 1))


def test_durations() -> None:
    assert [duration(x) for x in (0, 900, 1.5e6, 2e9)] == ["0 us", "0.9 us", "1.5 ms", "2 s"]


def test_the_command(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    write(trace, path)
    write(replace(trace, ranks=trace.ranks[:1]), other)
    assert main(["trace", str(path)]) == 0
    told = capsys.readouterr().out
    assert told == f"{report(trace)}\npicture: {tmp_path / 'a.svg'}\n"
    assert (tmp_path / "a.svg").read_text() == picture(trace)
    assert main(["trace", str(path), "--compare", str(other)]) == 0
    assert re.search(r"compute +17 ms +17 ms +1\.00", capsys.readouterr().out)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', f'{{"{KEY}": {{"version": 1}}}}', "no json"])
def test_other_files_are_refused_by_name(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert main(["trace", str(path)]) == 2
    assert f"lightning_par trace: {path} is no trace that ParallelTrace wrote" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "can't be read: No such file or directory" in capsys.readouterr().err


def test_a_later_format_is_refused(trace: Trace, tmp_path: Path) -> None:
    write(trace, tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text())
    told[KEY]["version"] = 99
    (tmp_path / "a.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="another version"):
        read(tmp_path / "a.json")


class _Work:
    def wait(self) -> None:
        pass


def _recorded(waits_in_place: bool) -> Recorder:
    """A sum that is waited for, and a batch of two messages with one work, by a clock that counts."""
    moments = iter(range(0, 1000, 10))
    recorder = Recorder(lambda: next(moments), waits_in_place)
    line, work = ("tensor", (0, 1)), _Work()
    recorder.wait(recorder.call((line, 1, "all_reduce", "leave", 4, None), 16, lambda: work))
    begun = [((line, n, verb, "ring", 4, 1), 16) for n, verb in ((1, "send"), (2, "recv"))]
    both = recorder.exchange(begun, lambda: [work, work])
    recorder.wait(both[0])
    recorder.wait(both[1])
    recorder.call((line, 2, "broadcast", "batch", 4, None), 0, lambda: _Work(), of_objects=True)
    recorder.wait(_Work())  # begun before
    return recorder


def test_a_recorder_tells_when_each_message_began_ended_and_was_waited_for() -> None:
    recorder = _recorded(True)
    assert [(one.begun[2], one.begin, one.end) for one in recorder.messages] == [
        ("all_reduce", 0, 30), ("send", 40, 70), ("recv", 40, 70), ("broadcast", 100, 110),
    ]  # fmt: skip
    assert [*map(tuple, recorder.spent)] == [
        (0, 0, 10), (0, 20, 30), (1, 40, 50), (1, 60, 70), (OTHER, 80, 90), (3, 100, 110), (OTHER, 120, 130),
    ]  # fmt: skip


def test_what_a_kernel_moves_is_what_the_call_that_launched_it_asked_for() -> None:
    recorder = _recorded(False)
    kernels = [Ran("ncclA", 500, 600, 5), Ran("ncclB", 610, 700, 45), Ran("ncclUsers", 710, 720, 75)]
    functions = [Ran("gemm", 550, 650, 2)]
    profiled = Profiled((), (kernels[0], *functions, *kernels[1:]), 1)
    found = rank_trace(Place(0, 2, "h", 0, "cuda:0"), recorder, profiled, [Window(0, 0, 0, 1000)])
    assert [(m.verb, m.begin, m.end) for m in found.messages[:3]] == [
        ("all_reduce", 500, 600), ("send", 610, 700), ("recv", 610, 700),
    ]  # fmt: skip
    (step,) = found.steps
    assert step.compute == 100 and step.pieces == (Piece(0, 500, 550), Piece(1, 650, 700), Piece(OTHER, 710, 720))
    assert on_device([], [], [])[0] == []


def test_users_own_collectives_are_told_apart_on_a_cpu() -> None:
    recorder = _recorded(True)
    ran = (Ran("c10d::allreduce_", 1, 9, 1), Ran("aten::mm", 200, 300, 200), Ran("c10d::barrier", 400, 450, 400))
    found = rank_trace(Place(0, 2, "h", 0, "cpu"), recorder, Profiled(ran, (), 1), [Window(0, 0, 0, 1000)])
    (step,) = found.steps
    assert step.compute == 100 and step.pieces[-1] == Piece(OTHER, 400, 450)
    assert [one.name for one in found.functions] == ["aten::mm"]


def test_a_file_has_the_longest_functions_and_the_table_all() -> None:
    count, world = 100, MOST_FUNCTIONS // 10
    ran = tuple(Ran(f"aten::f{i}", 1000 + 100 * i, 1001 + 100 * i + i, 0) for i in range(count))
    found = rank_trace(Place(0, world, "h", 0, "cpu"), Recorder(), Profiled(ran, (), 1), [Window(0, 0, 0, 20_000)])
    assert [one.name for one in found.functions] == [f"aten::f{i}" for i in range(90, 100)]
    assert found.steps[0].compute == sum(i + 1 for i in range(count)) and "10 of its 100" in found.notes[0]


def test_a_full_recorder_takes_no_more_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_par.mesh.recorder.MOST", 3)
    recorder = _recorded(True)
    assert len(recorder.messages) + len(recorder.spent) <= 5 and recorder.is_full
    found = rank_trace(Place(0, 2, "h", 0, "cpu"), recorder, Profiled((), (), 0), [Window(0, 0, 0, 1000)])
    assert "more messages than a trace holds" in found.notes[0] and found.steps[0].length == 1000


def test_which_span_a_moment_lies_in() -> None:
    spans = [(0, 2), (5, 9), (9, 12)]
    assert [containing(spans, at) for at in (0, 2, 3, 5, 8, 12, 13)] == [0, 0, None, 1, 1, 2, None]
    assert containing([], 5) is None


def test_what_ran_in_two_times() -> None:
    some = [Profiled((Ran("a", 0, 1, 0),), (), 3), Profiled((Ran("b", 5, 6, 5),), (Ran("k", 7, 8, 6),), 2)]
    assert joined(some) == Profiled((*some[0].functions, *some[1].functions), some[1].kernels, 3)
    assert joined([]) == Profiled((), (), 0)
