"""Shards that a callback keeps on the host are moved between ranks there, or by their devices: NCCL takes none."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from lightning_par import HybridParallelStrategy
from lightning_par.mesh.layout import Layout, make_groups
from lightning_par.mesh.world_groups import host_group
from tests.gpu_rules.ranks import StrictPool
from tests.helpers import surface
from tests.helpers.slow import slow
from tests.law.test_features import At, Net, run_one


@slow()
def test_averages_that_lie_on_the_host_are_written_into_weights_on_a_device(pool: StrictPool, tmp_path: Path) -> None:
    found = pool.run(2, run_one, "tensor", str(tmp_path), "`StochasticWeightAveraging`")
    assert [kind for kind, _ in found] == ["gave", "gave"], found[0][1]
    assert pool.broken() == []


def _averaged(strategy: Any, folder: Path) -> dict[str, Tensor]:
    module, averages = Net(), StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    surface.trainer([averages], strategy=strategy, max_epochs=3).fit(module, At("", folder).loader())
    return surface.weights(module)


def _averaged_over_two_axes(folder: Path) -> dict[str, Tensor]:
    return _averaged(HybridParallelStrategy(tensor_parallel_size=2, sequence_parallel_size=2), folder)


def _averaged_alone(folder: Path) -> dict[str, Tensor]:
    return _averaged("auto", folder)


@slow()
def test_averages_are_written_where_no_group_of_hosts_is_along_the_axis(pool: StrictPool, tmp_path: Path) -> None:
    (wanted,), found = pool.run(1, _averaged_alone, tmp_path), pool.run(4, _averaged_over_two_axes, tmp_path)
    for given in found:
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-9)
    assert pool.broken() == []


def _verbs() -> dict[str, Any]:
    """What each verb gives of tensors on the host, and on the device; whether a group of hosts is along the axis."""
    dist.init_process_group("nccl")
    axis, found = make_groups(Layout(tensor=2, sequence=2), timedelta(minutes=1)).tensor, {}
    for place in ("cpu", "cuda"):
        x = torch.arange(4.0, device=place) + 10 * axis.rank
        gathered = axis.all_gather(x, "test")
        scattered = axis.reduce_scatter([x, 2 * x], "test")
        summed, sent = axis.all_reduce_(x.clone(), "test"), axis.broadcast_(x.clone(), "test", source=1)
        swapped = axis.all_to_all(x, [1, 3], [[1, 1], [3, 3]][axis.rank], "test")
        given = gathered, scattered, summed, sent, swapped
        assert {y.device.type for y in given} == {place}
        found[place] = [y.tolist() for y in given]
    return {**found, "has a group of hosts": host_group(axis.group) is not axis.group}


def test_all_verbs_take_what_lies_on_the_host(pool: StrictPool) -> None:
    for found in pool.run(4, _verbs):
        assert found["cpu"] == found["cuda"] and not found["has a group of hosts"]
    assert pool.broken() == []
