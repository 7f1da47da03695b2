"""What attention over a sharded sequence computes and moves is decided by pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sequence import scheme
from lightning_par.sequence.blocks import KernelCall, contiguous, pairs, plan, zigzag
from lightning_par.sequence.scheme import Scheme, Shapes, check_asked, choose, describe, elements, grid_lines
from tests.helpers.sequence_ranks import KINDS


def _attended(call: KernelCall, n: int, m: int) -> np.ndarray:
    """How often each pair is computed."""
    query, key = np.arange(n)[:, None], np.arange(m)
    rows, columns = call.queries, call.keys
    inside = (query >= rows.start) & (query < rows.stop) & (key >= columns.start) & (key < columns.stop)
    if call.causal:
        inside &= key - columns.start <= query - rows.start
    if call.seen is not None:
        seen = np.zeros(n)
        seen[rows] = call.seen
        inside &= key - columns.start < seen[:, None]
    assert inside.sum() == call.pairs
    return inside.astype(int)


def _check_plan(queries: Positions, keys: Positions, ranks: int, causal: bool) -> int:
    """Every attended pair is computed once; returns the most calls of a block."""
    most = 0
    for rank in range(ranks):
        for source in range(ranks):
            q, k = queries.indices(rank), keys.indices(source)
            expected = (k <= q[:, None]) | (not causal)
            calls = plan(queries, keys, rank, source, causal)
            assert all(call.pairs for call in calls)
            got = sum((_attended(call, len(q), len(k)) for call in calls), np.zeros((len(q), len(k)), int))
            assert np.array_equal(got, expected.astype(int))
            most = max(most, len(calls))
    return most


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_calls_are_the_attended_pairs_once(ranks: int) -> None:
    random = np.random.default_rng(ranks)

    def anyhow(size: int, ranks: int) -> Positions:
        return Positions.of(random.integers(0, ranks, size))

    for n, m in ((16, 16), (13, 13), (13, 7), (5, 12), (1, 3), (2, 1)):
        for q_kind in (*KINDS.values(), anyhow):
            for k_kind in (*KINDS.values(), anyhow):
                for causal in (True, False):
                    _check_plan(q_kind(n, ranks), k_kind(m, ranks), ranks, causal)


@pytest.mark.parametrize("kind", [zigzag, contiguous])
@pytest.mark.parametrize("size", [64, 61, 9])
def test_the_usual_orders_take_one_call_a_block(kind: Any, size: int) -> None:
    assert _check_plan(kind(size, 4), kind(size, 4), 4, True) == 1
    assert _check_plan(kind(size, 4), kind(size, 4), 4, False) == 1


def test_a_staircase_of_many_steps_is_one_masked_call() -> None:
    queries = Positions.of([*[0, 1, 1] * 40])
    keys = Positions.of([1] * 60 + [0] * 60)
    (call,) = plan(queries, keys, 0, 0, True)
    assert call.seen is not None
    assert _check_plan(queries, keys, 2, True) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zigzag_gives_every_rank_as_many_causal_pairs(ranks: int) -> None:
    g = 5  # tokens of a chunk
    order = zigzag(2 * ranks * g, ranks)
    counts = {pairs(order, order, rank, True, ranks) for rank in range(ranks)}
    assert counts == {(2 * ranks - 1) * g * g + g * (g + 1)}
    s = order.size
    assert counts == {s * (s + 1) // 2 // ranks}
    slowest = pairs(contiguous(s, ranks), contiguous(s, ranks), ranks - 1, True, ranks)
    assert slowest * ranks > (s * (s + 1) // 2) * (2 * ranks - 1) / ranks - s * ranks


def test_zigzag_of_any_size() -> None:
    assert zigzag(10, 2).owner.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert zigzag(1, 4).owner.tolist() == [0] and zigzag(0, 2).size == 0


MHA = Shapes(batch=2, heads=8, kv_heads=8, queries=64, keys=64, features=16)
GQA = Shapes(batch=2, heads=8, kv_heads=2, queries=64, keys=64, features=16)


def test_bytes_follow_the_formulas() -> None:
    b, s, h = 2, 64, 128
    assert elements(Scheme("ring", 1, 4), MHA) == elements(Scheme("all_gather", 1, 4), MHA) == 6 * b * s * h * 3 / 4
    assert elements(Scheme("ulysses", 4, 1), MHA) == 4 * b * s * 2 * h * 3 / 16
    assert elements(Scheme("product", 2, 2), MHA) == 4 * b * s * 2 * h / 8 + 6 * b * s * h / 2 / 2
    everywhere = Shapes(2, 8, 8, 64, 64, 16, spread=False)
    assert elements(Scheme("ring", 1, 4), everywhere) == 0


def test_auto_takes_the_fewest_bytes() -> None:
    assert choose("auto", 4, MHA) == Scheme("ulysses", 4, 1)
    assert choose("auto", 2, GQA) == Scheme("ring", 1, 2)  # heads are too many to turn for two of keys
    assert choose("auto", 4, GQA) == Scheme("ring", 1, 4)  # 2 key heads don't go over 4 ranks
    assert choose("auto", 8, MHA, degrees=(2,)) == Scheme("ulysses", 8, 1)
    many = Shapes(2, 32, 4, 64, 64, 16)
    assert choose("auto", 16, many, degrees=(4,)) == Scheme("product", 4, 4)
    assert choose("auto", 4, Shapes(2, 8, 8, 64, 64, 16, spread=False)) == Scheme("ring", 1, 4)
    # The break-even is c > (2/3)(1 + h / h_kv).
    for ranks in (2, 4, 8):
        grouped = Shapes(1, 64, 16, 64, 64, 8)
        assert (choose("auto", ranks, grouped).kind == "ulysses") == (ranks > 2 / 3 * (1 + 4))


def test_by_name() -> None:
    assert choose("ring", 4, MHA) == Scheme("ring", 1, 4)
    assert choose("all_gather", 4, MHA) == Scheme("all_gather", 1, 4)
    assert choose({"ulysses": 2, "ring": 2}, 4, GQA) == Scheme("product", 2, 2)
    assert choose({"ulysses": 1, "ring": 4}, 4, GQA) == Scheme("ring", 1, 4)
    assert choose({"ulysses": 4, "ring": 1}, 4, MHA) == Scheme("ulysses", 4, 1)
    with pytest.raises(ValueError, match="2 key/value heads can't be spread over 4 ranks.*attention='ring'"):
        choose("ulysses", 4, GQA)
    with pytest.raises(ValueError, match="8 query heads can't be spread over 3 ranks"):
        choose({"ulysses": 3, "ring": 1}, 3, MHA)
    with pytest.raises(ValueError, match=r"2 \* 3 = 6 ranks, but the sequence is spread over 4"):
        choose({"ulysses": 2, "ring": 3}, 4, MHA)


@pytest.mark.parametrize(
    ("asked", "error"),
    [("rings", ValueError), ({"ulysses": 2}, ValueError), ({"ulysses": 0, "ring": 2}, ValueError), (None, TypeError),
     (3, TypeError), ({"ulysses": True, "ring": 2}, TypeError), ({"ulysses": "2", "ring": 2}, TypeError),
     ({"ulysses": 2, "ring": 2, "x": 1}, ValueError)],
)  # fmt: skip
def test_what_can_be_asked_for_is_checked_at_once(asked: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`attention`"):
        check_asked(asked)


def test_what_can_be_asked_for() -> None:
    for asked in (*scheme.NAMES, {"ulysses": 2, "ring": 4}):
        assert check_asked(asked) == asked
    assert scheme.ulysses_size({"ulysses": 2, "ring": 4}, 8) == 2 and scheme.ulysses_size("ulysses", 8) == 1


def test_the_axes_of_a_product() -> None:
    ranks = (8, 9, 10, 11, 12, 13)
    groups, rings = grid_lines(ranks, 2)
    assert groups == [(8, 9), (10, 11), (12, 13)] and rings == [(8, 10, 12), (9, 11, 13)]
    axis = Axis("sequence", ranks, 3, None)
    grid = scheme.make_grid(axis, 2, lambda name, line, rank: Axis(name, line, rank, None))
    assert grid.ulysses is not None and grid.ring is not None
    assert (grid.ulysses.ranks, grid.ulysses.rank, grid.ring.ranks, grid.ring.rank) == ((10, 11), 1, (9, 11, 13), 1)
    inner, outer = grid.part(zigzag(24, 6))
    assert outer is zigzag(24, 3)
    assert inner.owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_the_start_up_line() -> None:
    assert describe(Scheme("ring", 1, 4), MHA, 4) == "attention: ring over 4 ranks, 294.9 KB sent by a rank a step"
    line = describe(Scheme("product", 2, 2), MHA, 2, count=12)
    assert line.startswith("attention (12 calls): ulysses over 2 x ring over 2 ranks, ")
    assert "all-gather over 2 ranks" in describe(Scheme("all_gather", 1, 2), MHA, 4)
