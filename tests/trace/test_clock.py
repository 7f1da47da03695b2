"""Two clocks, and what messages there and back tell of them."""

from __future__ import annotations

import random
import socket
import threading
import time
from functools import partial

import pytest

from lightning_par.mesh.side_channel import Line
from lightning_par.trace.clock import PINGS, Ping, estimate, ping, pong


@pytest.mark.parametrize("seed", range(40))
def test_the_true_offset_is_within_the_uncertainty_however_unlike_both_ways_are(seed: int) -> None:
    draw = random.Random(seed)
    offset = draw.randrange(-(10**12), 10**12)
    pings = []
    for _ in range(draw.randrange(1, 40)):
        asked = draw.randrange(10**9)
        there = draw.choice([0, 1, 50_000, 10**7]) + draw.randrange(1000)
        back = draw.choice([0, 1, 50_000, 10**7]) + draw.randrange(1000)
        pings.append(Ping(asked, asked + there - offset, asked + there + back))
    clock = estimate(pings)
    assert abs(clock.offset - offset) <= clock.uncertainty and clock.pings == len(pings)


def test_no_pings_tell_nothing() -> None:
    with pytest.raises(ValueError, match="no pings"):
        estimate([])


@pytest.mark.parametrize("ahead", [0, 123_456_789_012, -5_000_000])
def test_a_clock_at_the_other_end_of_a_connection(ahead: int) -> None:
    """The other clock is this one and as much, so the truth is known."""
    here, there = socket.socketpair()
    thread = threading.Thread(target=pong, args=(Line(there), lambda: time.perf_counter_ns() + ahead))
    with here, there:
        thread.start()
        found = ping(Line(here))
        thread.join()
    assert abs(found.offset + ahead) <= found.uncertainty < 10**9 and found.pings == PINGS


def test_who_answers_late_makes_it_uncertain_and_not_wrong() -> None:
    here, there = socket.socketpair()

    def slow() -> int:
        now = time.perf_counter_ns()
        time.sleep(0.002)  # on the way back alone
        return now

    thread = threading.Thread(target=partial(pong, Line(there), slow))
    with here, there:
        thread.start()
        found = ping(Line(here))
        thread.join()
    assert abs(found.offset) <= found.uncertainty and found.uncertainty >= 1_000_000
