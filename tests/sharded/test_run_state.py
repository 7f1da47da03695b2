"""Which run is the current one, where runs begin within each other."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightning_par.sharded.run_state import RunState


def test_a_run_within_another_is_the_current_one_until_it_ends() -> None:
    outside, outer, inner = RunState.current, RunState(), RunState()
    outer.begin()
    with outer.entered():  # a step, in which another run begins and ends
        inner.begin()
        with inner.entered():
            assert RunState.current is inner
        inner.end()
        assert RunState.current is outer
    outer.end()
    assert RunState.current is outside


def test_runs_may_end_in_the_order_in_which_they_began() -> None:
    outside, first, second = RunState.current, RunState(), RunState()
    first.begin()
    second.begin()
    with first.entered():
        assert RunState.current is first
    assert RunState.current is second
    first.end()
    assert RunState.current is second
    second.end()
    assert RunState.current is outside


def test_a_run_that_ended_within_a_step_of_another_is_not_come_back_to() -> None:
    outside, first, second = RunState.current, RunState(), RunState()
    first.begin()
    second.begin()
    with first.entered():
        second.end()
        assert RunState.current is first
    assert RunState.current is first
    first.end()
    assert RunState.current is outside


def test_an_error_in_a_step_leaves_the_run_as_it_was() -> None:
    outside, state = RunState.current, RunState()
    with pytest.raises(KeyError), state.entered():
        raise KeyError
    assert RunState.current is outside


def test_a_copy_has_nothing_of_the_run() -> None:
    state = RunState()
    state.gathers["cumsum", "here"] = 1
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert type(other) is RunState and not other.gathers
