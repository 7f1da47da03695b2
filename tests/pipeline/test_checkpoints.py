"""A checkpoint of any strategy is one device's file; another layout resumes it, and the other way round."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_checkpoints import RANKS, _best_and_last, _hooks, _resume, load, stored
from tests.checkpoint.test_checkpoints import saved as saved  # a fixture
from tests.helpers.differences import differences
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

PARTS = ["state_dict", "optimizer_states", "lr_schedulers", "callbacks", "hyper_parameters"]


@long()
@slow("edits")
@pytest.mark.parametrize("kind", ["model", "edits"])
def test_with_one_microbatch_the_file_is_bitwise_that_of_one_device(kind: str, saved: Any) -> None:
    for layout in ("pp2-whole", "placed"):
        one, other = load(saved("one", kind)), load(saved(layout, kind))
        assert not differences(one, other, 0.0)
        assert stored(saved("one", kind)) == stored(saved(layout, kind)), "more than is needed"


@long()
@slow(but=["zbv"])
@pytest.mark.parametrize("layout", ["pp2", "pp4", "zbv", "dp2-pp2"])
def test_microbatches_change_the_file_by_rounding_alone(layout: str, saved: Any) -> None:
    one, other = load(saved("one")), load(saved(layout))
    assert not differences(one, other, 1e-9)
    weights = other["state_dict"]
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr(), "tied weights"


@slow(but=["placed-one-model-False"])
@pytest.mark.parametrize(
    ("writer", "reader", "kind", "mixed"),
    [
        ("pp2", "one", "model", False),
        ("one", "pp2", "model", False),
        ("pp2", "pp4", "model", False),
        ("pp4", "tp2", "model", False),
        ("tp2", "zbv", "model", False),
        ("zbv", "dp2-pp2", "model", False),
        ("placed", "one", "model", False),
        ("one", "placed", "model", False),
        ("placed", "tp2", "edits", False),
        ("pp2", "placed", "model", False),
        ("sp2", "placed", "model", True),
        ("tp2", "sp2", "model", False),
        ("placed", "pp2-tp2", "model", False),
        ("pp2-tp2", "one", "model", False),
        ("pp2", "one", "edits", False),
        ("one", "pp4", "edits", False),
        ("one", "pp2", "model", True),
        ("pp2", "tp2", "model", True),
    ],
)
def test_what_one_layout_saves_another_loads_bitwise_and_trains_on(
    writer: str, reader: str, kind: str, mixed: bool, saved: Any, pool: Pool, tmp_path: Path
) -> None:
    options = dict(mixed=True) if mixed else {}
    again, end = tmp_path / "again.ckpt", tmp_path / "end.ckpt"
    losses = pool.run(RANKS[reader], _resume, reader, saved(writer, kind, **options), again, end, kind, **options)
    first, second = load(saved(writer, kind, **options)), load(again)
    for part in PARTS + ["MixedPrecision"] * mixed:
        assert not differences(first[part], second[part], 0.0), part
    assert all(loss == losses[0] for loss in losses)
    if not mixed:
        assert not differences(load(saved("one", kind, epochs=2)), load(end), 1e-9)


def test_hooks_may_save_at_any_time(pool: Pool, tmp_path: Path) -> None:
    for layout in ("one", "pp2-whole"):
        pool.run(RANKS[layout], _hooks, layout, tmp_path / layout)
    names = sorted(os.listdir(tmp_path / "one"))
    assert names == sorted(os.listdir(tmp_path / "pp2-whole")) and len(names) == 3
    for name in names:
        assert not differences(*(load(tmp_path / layout / name) for layout in ("one", "pp2-whole")), 0.0), name


@slow()
def test_best_and_last_load_the_same_weights_as_on_one_device(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _best_and_last, "one", tmp_path / "one")
    for found in pool.run(2, _best_and_last, "pp2", tmp_path / "pp2"):
        assert not differences(one, found, 1e-9)
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "pp2"))
