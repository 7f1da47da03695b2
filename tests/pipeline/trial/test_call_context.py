"""What a unit is told counts as far as it is looked at, and no less."""

from __future__ import annotations

from typing import Any

from lightning_par.pipeline.trial import call_context
from lightning_par.pipeline.trial.call_context import told_to


def _told(last: int) -> tuple[Any, ...]:
    edges = [*((n, 0) for n in range(2_000)), (0, last)]
    return told_to("net.1", (edges,), {})


def test_the_last_of_many_things_counts() -> None:
    assert _told(1) == _told(1) != _told(2)


def test_what_is_too_much_to_be_looked_at_is_another_thing_each_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(call_context, "_MOST", 1_000)
    assert _told(1) != _told(1)
