"""Schedules: every order can be run, costs what the closed forms say, and is torch's own where torch has one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_par.pipeline.plan.gantt import gantt
from lightning_par.pipeline.plan.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    make_forward_schedule,
    make_schedule,
    make_schedule_again,
    place_stages,
    stages_per_rank,
)
from lightning_par.pipeline.simulate import (
    Span,
    bubble,
    microbatches_for,
    predicted_bubble,
    replay,
    simulate,
)


def stage_counts(name: str, ranks: int) -> list[int]:
    several = (2, 3, 4) if SCHEDULES[name].shape == "loop" else (stages_per_rank(name),)
    return [ranks * count for count in several]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most stage activations that each rank holds at once: from a forward to the end of its backward."""
    return tuple(_peak(order) for order in schedule.actions)


def in_flight_microbatches(schedule: Schedule) -> tuple[float, ...]:
    """`in_flight` in microbatches: a rank that holds one activation of each of its stages holds one."""
    return tuple(peak / max(1, schedule.placement.count(rank)) for rank, peak in enumerate(in_flight(schedule)))


def in_flight_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The most activations of each stage that are held at once."""
    orders = [schedule.actions[rank] for rank in schedule.placement]
    return tuple(_peak([action for action in order if action.stage == s]) for s, order in enumerate(orders))


def _peak(order: Sequence[Action]) -> int:
    held = peak = 0
    for action in order:
        held += {"F": 1, "I": 0}.get(action.op, -1)
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_run(name: str, ranks: int) -> None:
    for stages in stage_counts(name, ranks):
        for microbatches in range(1, 10):
            schedule = make_schedule(name, ranks, microbatches, stages)
            check(schedule)
            check(make_forward_schedule(schedule, microbatches))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_go_through_its_stages_again(name: str, ranks: int) -> None:
    for stages in stage_counts(name, ranks):
        for microbatches in range(1, 10):
            once = make_schedule(name, ranks, microbatches, stages)
            again = make_schedule_again(name, once.placement * 3, microbatches)
            check(again)
            assert again.trains and again.placement == once.placement * 3


def test_forwards_can_be_run_under_any_placement_and_the_backwards_after_them() -> None:
    draw = random.Random(0)
    for _ in range(100):
        placement = tuple(draw.randrange(4) for _ in range(draw.randint(1, 9)))
        check(make_forward_schedule(placement, draw.randint(1, 7)))
        check(make_schedule_again("gpipe", placement, draw.randint(1, 7)))
    for microbatches, wanted in ((8, 3 / 19), (1, 0.75)):
        looped = make_forward_schedule(make_schedule("interleaved_1f1b", 4, 8), microbatches)
        assert bubble(simulate(looped), 4) == pytest.approx(wanted)


BUBBLES = [
    ("gpipe", 1, (0.2727, 0.1579, 0.1795)),
    ("1f1b", 1, (0.2727, 0.1579, 0.1795)),
    ("interleaved_1f1b", 2, (0.1579, 0.0857, 0.0986)),
    ("interleaved_1f1b", 4, (0.0857, 0.0448, 0.0519)),
    ("interleaved_zero_bubble", 2, (0.0588, 0.0303, 0.0352)),
    ("zbv", 2, (0.0588, 0.0303, 0.0352)),
]


@pytest.mark.parametrize(("name", "chunks", "wanted"), BUBBLES)
def test_bubbles_are_the_known_ones(name: str, chunks: int, wanted: tuple[float, ...]) -> None:
    for (ranks, microbatches), value in zip([(4, 8), (4, 16), (8, 32)], wanted):
        found = predicted_bubble(name, ranks, microbatches, chunks * ranks)
        assert round(found, 4) == value
        if "zb" not in name and "zero" not in name:
            assert found == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1), abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 8, 9])
def test_activations_held_are_the_known_ones(ranks: int, microbatches: int) -> None:
    assert in_flight(make_schedule("gpipe", ranks, microbatches)) == (microbatches,) * ranks
    wanted = tuple(min(microbatches, ranks - i) for i in range(ranks))
    assert in_flight(make_schedule("1f1b", ranks, microbatches)) == wanted
    for name in SCHEDULES:
        schedule = make_schedule(name, ranks, microbatches)
        assert max(in_flight_microbatches(schedule)) <= microbatches


def test_interleaving_holds_the_known_activations() -> None:
    assert in_flight_microbatches(make_schedule("interleaved_1f1b", 4, 8)) == (5.5, 4.5, 3.5, 2.5)
    assert in_flight_microbatches(make_schedule("interleaved_1f1b", 4, 16, 16)) == (4.75, 4.25, 3.75, 3.25)
    assert in_flight_microbatches(make_schedule("interleaved_zero_bubble", 4, 8)) == (4, 4, 4, 4)
    assert in_flight_microbatches(make_schedule("zbv", 4, 8)) == (4, 4, 4, 4)
    assert in_flight_by_stage(make_schedule("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight_by_stage(make_schedule("zbv", 2, 8)) == (4, 3, 2, 1)


TORCH = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 3), (4, 8), (4, 10), (3, 9)])
def test_orders_are_torchs(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    # Torch's classes want live stages and a process group; their order needs these numbers alone.
    numbers = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=2,
        num_stages=2 * ranks,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // max(1, microbatches // ranks),
    )
    for rank in range(ranks):
        theirs = TORCH[name]._calculate_single_rank_operations(numbers, rank)
        known = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in theirs if a is not None]
        assert [(a.op, a.stage, a.microbatch) for a in schedule.actions[rank]] == known


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2f2b", 2, 4), "no schedule '2f2b'.*'zbv'"),
        (("1f1b", 2, 0), "microbatches=0"),
        (("1f1b", 0, 1), "ranks=0"),
        (("gpipe", 2, 4, 4), "stages=4 must be ranks=2"),
        (("1f1b", 4, 4, 2), "stages=2 must be ranks=4"),
        (("zbv", 2, 4, 6), "stages=6 must be 2 \\* ranks = 4"),
        (("interleaved_1f1b", 4, 4, 6), "stages=6 must be a multiple of ranks=4"),
        (("interleaved_zero_bubble", 2, 4, 2), "stages=2 .* at least 4"),
    ],
)
def test_what_can_not_be_is_refused(arguments: tuple[str, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_schedule(*arguments)


def test_bad_schedules_are_found() -> None:
    good = make_schedule("1f1b", 2, 2)
    first, second = good.actions
    with pytest.raises(ValueError, match="never ends.*rank 0 for B0.0.*rank 1 for F1.0"):
        check(replace(good, actions=((first[2], *first[:2], first[3]), second)))
    with pytest.raises(ValueError, match="stage 1 has F for microbatch 1, not BF or FIW"):
        check(replace(good, actions=(first, second[:-1])))
    with pytest.raises(ValueError, match="rank 1 runs F0.0"):
        check(replace(good, actions=(first, (first[0], *second))))
    with pytest.raises(ValueError, match="need stages and microbatches"):
        make_forward_schedule((), 2)


def test_costs_may_differ_by_stage() -> None:
    cost = {"F": 1.0, "B": 3.0}
    spans = simulate(make_schedule("1f1b", 2, 1), [cost, {"F": 2.0, "B": 4.0}])
    assert [(str(span.action), span.start, span.end) for span in spans] == [
        ("F0.0", 0, 1),
        ("F1.0", 1, 3),
        ("B1.0", 3, 7),
        ("B0.0", 7, 10),
    ]
    with pytest.raises(ValueError, match="costs for 1 stages, but 2"):
        simulate(make_schedule("1f1b", 2, 1), [cost])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_replayed_trace_is_its_schedule(name: str) -> None:
    schedule = make_schedule(name, 3, 5)
    by_rank = [(rank, a.op, a.stage, a.microbatch) for rank, order in enumerate(schedule.actions) for a in order]
    assert replay(by_rank) == simulate(schedule)
    with pytest.raises(ValueError, match="never ends"):
        replay(by_rank[1:])
    assert replay([]) == ()


def test_microbatches_are_enough_for_a_bubble() -> None:
    assert microbatches_for("1f1b", 4, most=64) == 28
    assert microbatches_for("1f1b", 4, most=27) == 27  # no multiple of 4, but enough
    assert microbatches_for("1f1b", 4, most=9) == 9  # never enough: the best there is
    assert microbatches_for("zbv", 4, most=64) == 8
    assert microbatches_for("gpipe", 1, most=64) == 1
    assert microbatches_for("interleaved_1f1b", 8, 0.5, most=3) == 3
    with pytest.raises(ValueError, match="most=0"):
        microbatches_for("1f1b", 4, most=0)
    for name in SCHEDULES:
        lost = [predicted_bubble(name, 4, count) for count in range(4, 41, 4)]
        assert lost == sorted(lost, reverse=True), "the search halves a list that must fall"


def test_a_schedule_prints() -> None:
    schedule = make_schedule("zbv", 2, 1)
    assert place_stages("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert (schedule.placement, schedule.rank_of(2)) == ((0, 1, 1, 0), 1)
    assert str(schedule).splitlines() == [
        "zbv: 4 stages on 2 ranks, 1 microbatches",
        "  rank 0: F0.0 F3.0 I3.0 W3.0 I0.0 W0.0",
        "  rank 1: F1.0 F2.0 I2.0 W2.0 I1.0 W1.0",
    ]


def test_a_gantt_is_a_picture_of_every_action(tmp_path: Path) -> None:
    schedule = make_schedule("zbv", 2, 3)
    text = gantt(simulate(schedule), tmp_path / "zbv.svg")
    assert text == gantt(reversed(simulate(schedule))) == (tmp_path / "zbv.svg").read_text()
    boxes = ElementTree.fromstring(text).findall(".//{*}g")
    assert len(boxes) == sum(map(len, schedule.actions))
    titles = [box[0].text for box in boxes]
    assert titles[0] == "F0.0: 0 to 1"
    assert f"bubble {100 * predicted_bubble('zbv', 2, 3):.1f} %" in text
    with pytest.raises(ValueError, match="no spans"):
        gantt([])


def test_a_gantt_takes_measured_seconds() -> None:
    spans = [Span(0, Action("F", 0, 0), 1e6 + 0.25, 1e6 + 0.5), Span(1, Action("B", 1, 11), 1e6 + 0.5, 1e6 + 0.51)]
    text = gantt(spans, unit="seconds < a minute")
    ElementTree.fromstring(text)
    assert "F0.0: 0 to 0.25" in text and ">0.2</text>" in text and "bubble 50.0 %" in text
    assert ">11</text>" in text  # ten milliseconds are still wide enough for two digits


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("gpipe", (4, 4)), ("1f1b", (2, 1)), ("interleaved_1f1b", (4, 3)), ("zbv", (4, 3))],
)
def test_microbatches_under_way_are_those_of_one_stage(name: str, wanted: tuple[int, ...]) -> None:
    assert make_schedule(name, 2, 4).under_way == wanted
