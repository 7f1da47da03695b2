"""What it costs to see where a step's decisions lead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_par.pipeline.program.decisions import follow_branches
from lightning_par.trial.guesses import TRIES, Guesses


def _runs(code: str, guarded: int = 0) -> int:
    """How many further runs there are of a step that decides as ``code`` does, and has so many guards."""
    compiled, runs = compile(code, "step.py", "exec"), 0

    def again(guesses: Guesses) -> Any:
        nonlocal runs
        runs += 1
        return _run(guesses), torch.zeros(())

    def _run(guesses: Guesses) -> Any:
        with ThreadPoolExecutor(1) as same:  # the user's code is called from the same place each time
            same.submit(exec, compiled, {"decides": guesses.compare, "__name__": "user"}).result()
        asks = dict(enumerate(guesses.decided))
        return SimpleNamespace(
            guesses=guesses,
            asks=asks,
            guards=frozenset(range(guarded)),
            units=[],
            events=[],
            tail=0,
            direct=[],
            told=[],
            overwritten=[],
            uses=lambda: [],
        )

    routes = SimpleNamespace(keys_coming=())
    program: Any = SimpleNamespace(routes=routes, wanted=frozenset(), starts=(0,), elsewhere=frozenset())
    follow_branches(_run(Guesses()), again, program)
    return runs


@pytest.mark.parametrize("decisions", [0, 1, 4, 40])
def test_each_decision_is_answered_otherwise_once(decisions: int) -> None:
    assert _runs("decides(False)\n" * decisions) == min(decisions, TRIES - 1)


def test_decisions_that_another_answer_alone_comes_to_are_followed() -> None:
    assert _runs("if decides(False):\n  if decides(False):\n    decides(False)") == 3


def test_a_step_that_raises_by_the_other_answer_costs_one_run() -> None:
    assert _runs("if decides(False): raise ValueError") == 1


def test_what_was_seen_to_raise_between_units_is_not_run_again() -> None:
    assert _runs("decides(False)\n" * 3, guarded=2) == 1


def test_decisions_come_in_the_order_in_which_they_were_asked() -> None:
    """As on all ranks, whatever the order of their sets is."""
    guesses = Guesses()
    exec(compile("decides(False)\n" * 30, "step.py", "exec"), {"decides": guesses.compare, "__name__": "user"})
    assert [place[1][1] for place in guesses.decided] == [*range(1, 31)]
