"""What ``make test`` leaves to others, said above the test and nowhere else: to CI what is `long`, seconds that add up;
to ``make test-all`` what is `slow`, minutes or gigabytes, or much like others.

    @long()  # the whole test
    @slow("tp4-*", "gpt-pp2")  # these rows of its table; a star stands for anything
    @slow(but=["gpt-tp2"])  # all rows but these

What is both is slow. An id that no row has fails when tests are collected. This module is the plugin that does it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from itertools import cycle
from typing import Any

import pytest

KINDS = ("slow", "long")


def slow(*ids: str, but: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Marks a test, or those of its rows that ``ids`` or ``but`` say."""
    return pytest.mark.slow_rows(*ids, but=tuple(but))


def long(*ids: str, but: Iterable[str] = ()) -> pytest.MarkDecorator:
    """The same of what CI runs all the same."""
    return pytest.mark.long_rows(*ids, but=tuple(but))


def in_turn(rows: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Ids of a row each, with one column after another: for a table of rows by columns that all do much the same."""
    return [f"{row}-{column}" for row, column in zip(rows, cycle(columns))]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes or gigabytes, or is much like others; see -m slow")
    config.addinivalue_line("markers", "long: takes seconds that add up; make test leaves it to CI")
    for kind in KINDS:
        config.addinivalue_line("markers", f"{kind}_rows(*ids, but): which rows are {kind}; written by {kind}() here")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Generator[None, Any, Any]:
    """Here a test has all of its rows, whichever were asked for on the command line."""
    made = yield
    items = [item for item in made if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    for kind in KINDS:
        if any(item.get_closest_marker(kind) for item in items):
            raise collector.CollectError(
                f"{name}: {kind} rows are said by {kind}() of tests.helpers.slow, above the test"
            )
    for kind in KINDS:
        for mark in items[0].iter_markers(f"{kind}_rows") if items else ():
            _mark(items, mark, kind, collector)
    return made


def _mark(items: list[pytest.Function], mark: pytest.Mark, kind: str, collector: pytest.Collector) -> None:
    rows = [item.callspec.id if hasattr(item, "callspec") else "" for item in items]
    unknown: list[str] = []
    said, but = (_matching(ids, rows, unknown) for ids in (mark.args or ("*",), mark.kwargs["but"]))
    if unknown:
        test = items[0].originalname
        raise collector.CollectError(f"{test} has no row {', '.join(map(repr, unknown))}; it has {rows}")
    for item, row in zip(items, rows):
        if row in said - but and not item.get_closest_marker("slow"):
            item.add_marker(kind)


def _matching(ids: Iterable[str], rows: list[str], unknown: list[str]) -> set[str]:
    """The rows that ``ids`` mean; an id that means none goes to ``unknown``."""
    found: set[str] = set()
    every = set(rows)
    for each in ids:
        pattern = re.compile(".*".join(map(re.escape, each.split("*"))), re.DOTALL)
        these = {row for row in every if pattern.fullmatch(row)} if "*" in each else every & {each}
        found |= these
        if not these:
            unknown.append(each)
    return found
