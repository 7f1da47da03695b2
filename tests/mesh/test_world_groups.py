"""Process groups: each rank makes its own, few of them whatever the world's size, and all ranks find each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_par.mesh import world_groups
from lightning_par.mesh.layout import Layout, make_groups
from lightning_par.mesh.subgroups import attend_along
from lightning_par.mesh.world_groups import process_group
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.run.tied_gradients import make_holder_axes
from lightning_par.private.process_groups import number_of_groups
from tests.helpers.pool import Pool

TIMEOUT = timedelta(minutes=1)
MOST = 64


@contextmanager
def _one_of(world: int, rank: int) -> Iterator[None]:
    """The process of one rank, whose messages go nowhere."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _alike(found: list[Any], own: Any, group: Any = None) -> None:
    found[:] = [own] * len(found)  # the fake group leaves what others say empty


@pytest.mark.parametrize("backends, most", [("cpu:fake,cuda:fake", 11), ("cuda:nccl", 14)])
@pytest.mark.parametrize("rank", [0, 517, 1023])
@pytest.mark.parametrize(
    "layout", [Layout(8, 16, 1, 8), Layout(64, 1, 1, 16), Layout(4, 8, 4, 8), Layout(1, 128, 8, 1)], ids=str
)
def test_a_rank_of_a_thousand_makes_a_few_dozen_groups_at_most(
    rank: int, layout: Layout, backends: str, most: int
) -> None:
    ends = (0, layout.pipeline - 1)
    placement = Placement({"tokens": ends, "middle": (1, layout.pipeline // 2)} if layout.pipeline > 2 else {})
    new_group = dist.new_group  # of gloo, ranks would wait for others
    made = mock.Mock(side_effect=lambda ranks, backend, **more: new_group(ranks, backend="fake", **more))
    with (
        _one_of(1024, rank),
        mock.patch.object(dist, "all_gather_object", _alike),
        mock.patch.object(dist, "get_backend_config", lambda group=None: backends),
        mock.patch.object(dist, "new_group", made),
    ):
        groups = make_groups(layout, TIMEOUT)
        attend_along(groups, {"ulysses": 2, "ring": layout.sequence // 2} if layout.sequence > 2 else "ring", TIMEOUT)
        make_holder_axes(placement, groups, TIMEOUT)
        assert made.call_count <= most < MOST
        hosts = [call for call in made.call_args_list if call.kwargs["backend"] == "gloo"]
        assert bool(hosts) == (backends == "cuda:nccl") and len(hosts) <= 3
        assert all(rank in call.args[0] for call in made.call_args_list), "a group of others was made"
        assert number_of_groups() == made.call_count + 1  # the world's


def _axes_after_others() -> list[float]:
    """A group that some ranks have made for themselves is in the way of names by number."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    me, sums = dist.get_rank(), []
    for own in (None, (0, 2)):
        if own is not None and me in own:
            dist.new_group(list(own), use_local_synchronization=True)
        # another timeout, else they are those of the first turn
        groups = make_groups(Layout(data=2, tensor=2), TIMEOUT + timedelta(seconds=len(sums)))
        for axis in (groups.data, groups.tensor, groups.world):
            sums.append(axis.all_reduce_(torch.tensor([float(me)]), "test").item())
    assert process_group([(0, 3)], TIMEOUT) is None or me in (0, 3)
    return sums


def test_axes_join_the_ranks_of_their_lines_whatever_groups_there_are(pool: Pool) -> None:
    results = pool.run(4, _axes_after_others)
    for me, sums in enumerate(results):
        expected = [me % 2 + (me % 2 + 2), 2 * (me // 2 * 2) + 1, 6]
        assert sums == [*expected, *expected]


def test_where_a_communicator_can_be_split_it_is_split_once_for_all_lines() -> None:
    """As NCCL's, which all ranks of the world must split together."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda:0"))
    lines = [(0, 2), (1, 3)]
    with (
        mock.patch.object(world_groups, "splits", lambda group: True),
        mock.patch.object(dist, "split_group", mock.Mock(return_value="own")) as split,
    ):
        made: Any = world_groups._make(world, tuple(lines), TIMEOUT, "", None)  # type: ignore[arg-type]
    assert made == "own"
    split.assert_called_once_with(split_ranks=[[0, 2], [1, 3]], timeout=TIMEOUT)
