"""Axis sizes, their arithmetic and its messages, the rank grid, and what two runs share of it."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from datetime import timedelta
from typing import Any, get_args

import pytest
import torch.distributed as dist

from lightning_par.mesh.layout import AxisName, Layout, make_groups
from lightning_par.mesh.subgroups import attend_along
from lightning_par.mesh.world_groups import process_group
from tests.helpers.pool import Pool

AXES: tuple[AxisName, ...] = get_args(AxisName)


@pytest.mark.parametrize("own", ["tensor", "pipeline", "sequence"])
@pytest.mark.parametrize(
    ("world", "asked", "data", "size"),
    [
        (8, "auto", 1, 8),  # the own axis takes the ranks
        (8, 4, 2, 4),  # what is left over becomes data parallel
        (8, 8, 1, 8),
        (8, 1, 8, 1),
        (6, 3, 2, 3),
        (1, "auto", 1, 1),
        (1, 1, 1, 1),
    ],
)
def test_auto_sizes(own: AxisName, world: int, asked: Any, data: int, size: int) -> None:
    layout = Layout.resolve(world, own=own, **{own: asked})
    assert (layout.data, getattr(layout, own)) == (data, size)
    assert layout.world_size == world


@pytest.mark.parametrize(("data", "tensor"), [(2, 4), (2, "auto"), ("auto", 4)])
def test_any_one_size_may_be_auto(data: Any, tensor: Any) -> None:
    assert Layout.resolve(8, own="tensor", data=data, tensor=tensor) == Layout(data=2, tensor=4)


def test_product_of_axes() -> None:
    layout = Layout.resolve(16, own="pipeline", pipeline="auto", sequence=2, tensor=2)
    assert layout == Layout(data=1, pipeline=4, sequence=2, tensor=2)
    assert Layout.resolve(16, own="pipeline", pipeline=2, sequence=2, tensor=2).data == 2


@pytest.mark.parametrize("size", [0, -2, 2.0, True, "4", None])
@pytest.mark.parametrize("axis", AXES)
def test_refuses_what_is_no_size(axis: AxisName, size: Any) -> None:
    with pytest.raises(ValueError, match=f"`{axis}_parallel_size` must be a positive int or 'auto', got {size!r}"):
        Layout.resolve(4, own="tensor", **{axis: size})


@pytest.mark.parametrize(
    ("world", "own", "sizes", "message"),
    [
        (4, "tensor", dict(tensor=3), ["tensor_parallel_size=3, but", "4 processes", "Write tensor_parallel_size=4"]),
        (2, "tensor", dict(tensor=4), ["tensor_parallel_size=4, but", "2 processes", "Write tensor_parallel_size=2"]),
        (
            8,
            "tensor",
            dict(data=2, tensor=2),
            ["data_parallel_size=2 * tensor_parallel_size=2 = 4", "8 processes", "Write tensor_parallel_size=4"],
        ),
        (
            8,
            "tensor",
            dict(data=3, tensor="auto"),
            ["data_parallel_size=3, but", "8 processes", "Write sizes whose product", "multiple of 3"],
        ),
        (8, "pipeline", dict(pipeline="auto", tensor=3), ["tensor_parallel_size=3, but", "multiple of 3"]),
        (8, "tensor", dict(data=3, tensor=3), ["data_parallel_size=3 * tensor_parallel_size=3 = 9", "8 processes"]),
    ],
)
def test_mismatch_shows_the_arithmetic(world: int, own: AxisName, sizes: dict[str, Any], message: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Layout.resolve(world, own=own, **sizes)
    assert [part for part in message if part not in str(caught.value)] == []


def test_hint_of_a_mismatch_would_do() -> None:
    """Wherever the message says to write a size, writing it works."""
    for world, data, tensor in itertools.product(range(1, 13), ["auto", 1, 2, 3, 4], [1, 2, 3, 4, 5, "auto"]):
        try:
            layout = Layout.resolve(world, own="tensor", data=data, tensor=tensor)
        except ValueError as error:
            if "Write tensor_parallel_size=" in str(error):
                size = int(str(error).split("Write tensor_parallel_size=")[1].split(",")[0])
                layout = Layout.resolve(world, own="tensor", data=data, tensor=size)
                assert layout.world_size == world
            else:
                assert isinstance(data, int) and world % data
        else:
            assert layout.data * layout.tensor == world


@pytest.mark.parametrize(
    ("own", "sizes", "message"),
    [
        ("tensor", dict(tensor="auto", pipeline="auto"), "can't both be 'auto'"),
        ("tensor", dict(tensor=2, pipeline="auto"), "`pipeline_parallel_size` can't be 'auto' beside"),
    ],
)
def test_refuses_two_unknowns(own: AxisName, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.resolve(8, own=own, **sizes)


def test_grid_keeps_tensor_ranks_next_to_each_other() -> None:
    layout = Layout(data=2, pipeline=2, tensor=2)
    assert layout.grid().shape == (2, 2, 1, 2)
    assert layout.lines(("tensor",)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.lines(("pipeline",)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.lines(("data",)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.lines(("pipeline", "sequence", "tensor")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.lines(("sequence",)) == [(rank,) for rank in range(8)]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 1, 3), (2, 3, 2, 2)])
def test_lines_partition_the_ranks(sizes: tuple[int, ...]) -> None:
    layout = Layout(*sizes)
    assert layout.sizes == sizes
    for count in range(len(AXES) + 1):
        for along in itertools.combinations(AXES, count):
            lines = layout.lines(along)
            assert all(len(line) == math.prod(getattr(layout, name) for name in along) for line in lines)
            assert all(list(line) == sorted(line) for line in lines)
            assert sorted(itertools.chain(*lines)) == list(range(layout.world_size))


def test_a_rank_is_moved_along_one_axis() -> None:
    layout = Layout(data=2, pipeline=3, sequence=2, tensor=2)
    grid = layout.grid()
    for rank in range(layout.world_size):
        where = [int(x) for x in (grid == rank).nonzero()[0]]
        for dim, axis in enumerate(("data", "pipeline", "sequence", "tensor")):
            for index in range(layout.sizes[dim]):
                there = [*where[:dim], index, *where[dim + 1 :]]
                assert layout.moved(rank, axis, index) == grid[tuple(there)]  # type: ignore[arg-type]


def test_prints_only_axes_in_use() -> None:
    assert str(Layout(data=2, tensor=4)) == "data 2 x tensor 4"
    assert str(Layout()) == "one rank"


def test_groups_of_one_rank_need_no_process_group() -> None:
    groups = make_groups(Layout(), timedelta(seconds=1))
    for axis in (groups.data, groups.pipeline, groups.sequence, groups.tensor, groups.replica, groups.world):
        assert (axis.size, axis.rank, axis.ranks, axis.group) == (1, 0, (0,), None)


def _two_runs() -> None:
    dist.init_process_group("gloo")
    layout, timeout = Layout(data=2, sequence=2), timedelta(minutes=1)
    first, second = make_groups(layout, timeout), make_groups(layout, timeout)
    world = weakref.ref(dist.group.WORLD)
    for name in ("data", "sequence", "gradients", "world"):
        one, other = getattr(first, name), getattr(second, name)
        assert one is not other and one.group is other.group and one.group is not None
    attend_along(first, {"ulysses": 1, "ring": 2}, timeout)
    assert second.sequence.attention is None
    alone = process_group([(0, 1, 2, 3)], timeout, "checkpoints")
    assert alone is not dist.group.WORLD and alone is process_group([(0, 1, 2, 3)], timeout, "checkpoints")
    held = weakref.ref(first.data.group)
    del one, other, first, second, alone
    assert held() is not None, "the next run has to make its groups anew"
    dist.destroy_process_group()
    gc.collect()
    assert held() is None and world() is None, "groups of a world that has ended are kept"


def test_two_runs_share_process_groups_and_nothing_else(pool: Pool) -> None:
    pool.run(4, _two_runs)
