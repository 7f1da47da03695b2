"""What says that rows are slow or long, on tests of its own."""

from __future__ import annotations

import pytest

from tests.helpers.longest import longest_first
from tests.helpers.slow import KINDS

TESTS = """
import pytest
from tests.helpers.slow import in_turn, long, slow

{mark}
@pytest.mark.parametrize("y", ["p", "q"])
@pytest.mark.parametrize("x", ["a", "a-b", "c[*]"])
def test_it(x, y): pass
"""


def _collect(
    pytester: pytest.Pytester, mark: str, *asked: str, which: str = "not slow and not long"
) -> tuple[int, str, list[str]]:
    """The exit code, what is said, and the rows that are neither slow nor long, or ``which`` says."""
    pytester.makepyfile(test_it=TESTS.format(mark=mark))
    options = ("-p", "tests.helpers.slow", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", which)
    done = pytester.runpytest_inprocess(*options, *asked)
    rows = [line.partition("[")[2][:-1] for line in done.outlines if line.startswith("test_it.py::")]
    return done.ret, done.stdout.str(), rows


@pytest.mark.parametrize(
    ("mark", "quick"),
    [
        ("", ["a-p", "a-q", "a-b-p", "a-b-q", "c[*]-p", "c[*]-q"]),
        ("@slow('a-p', 'c[*]-q')", ["a-q", "a-b-p", "a-b-q", "c[*]-p"]),
        ("@slow('a-*')", ["c[*]-p", "c[*]-q"]),
        ("@slow(but=['a-q'])", ["a-q"]),
        ("@slow('*-p', but=['a-*'])", ["a-p", "a-q", "a-b-p", "a-b-q", "c[*]-q"]),
        ("@slow(but=in_turn(['a', 'a-b', 'c[*]'], ['q', 'p']))", ["a-q", "a-b-p", "c[*]-q"]),
        ("@slow()", []),
        ("@long('a-p', 'c[*]-q')\n@slow('a-*')", ["c[*]-p"]),
        ("@long(but=['a-q'])", ["a-q"]),
    ],
    ids=["none", "ids", "star", "but", "both", "in turn", "all", "some long", "all but one long"],
)
def test_rows_are_slow_that_are_said_to_be(mark: str, quick: list[str], pytester: pytest.Pytester) -> None:
    assert _collect(pytester, mark)[2] == quick


@pytest.mark.parametrize("mark", ["@slow('a-p', 'b-p')", "@slow('b-*')", "@slow(but=['a-p', 'b-p'])", "@slow('b-p')"])
def test_an_id_that_no_row_has_fails_at_collection(mark: str, pytester: pytest.Pytester) -> None:
    code, said, _ = _collect(pytester, mark)
    assert code == pytest.ExitCode.INTERRUPTED, said
    assert "test_it has no row 'b-" in said and "it has ['a-p', " in said, said


def test_a_row_that_is_asked_for_by_name_is_judged_among_all(pytester: pytest.Pytester) -> None:
    assert _collect(pytester, "@slow('a-q')", "test_it.py::test_it[a-p]")[::2] == (0, ["a-p"])
    assert _collect(pytester, "@slow('a-q', 'b-p')", "test_it.py::test_it[a-p]")[0] != 0


def test_what_is_both_is_slow(pytester: pytest.Pytester) -> None:
    marks = "@long('a-p', 'c[*]-q')\n@slow('a-*')"
    assert _collect(pytester, marks, which="long")[2] == ["c[*]-q"]
    assert _collect(pytester, marks, which="slow")[2] == ["a-p", "a-q", "a-b-p", "a-b-q"]


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_no_other_way(kind: str, pytester: pytest.Pytester) -> None:
    code, said, _ = _collect(pytester, f"@pytest.mark.{kind}")
    assert code == pytest.ExitCode.INTERRUPTED and f"test_it: {kind} rows are said by {kind}()" in said, said


def test_a_file_that_is_said_to_take_long_is_there() -> None:
    with pytest.raises(pytest.UsageError, match="not there: law/gone$"):
        longest_first([], ["law/test_found", "law/gone"])
