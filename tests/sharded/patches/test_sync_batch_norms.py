"""``nn.SyncBatchNorm`` is a BatchNorm of all samples, of one copy of the model or of several."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import HybridParallelStrategy
from lightning_par.mesh.axis import Axis
from lightning_par.sharded.synced_norm import synced_norm
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, Points, check, compare, loader, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp", "sequence_parallel_size": 2},
}


class Normed(Net):
    def __init__(self, converted: bool = True) -> None:
        super().__init__()
        sizes = [(6, 16), (16, 16), (16, 8)]
        layers = [nn.Sequential(nn.Linear(i, o, bias=False), nn.BatchNorm1d(o), nn.Tanh()) for i, o in sizes]
        # a bias before a norm would have a gradient of rounding alone
        self.net = nn.Sequential(*layers)
        if converted:
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)


def _train(layout: str) -> dict[str, Any]:
    return trained(Normed(), loader(), lambda: HybridParallelStrategy(**LAYOUTS[layout]))


@long("pipeline")
@slow("sequence", "fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_a_batch_norm_with_one_copy_of_the_model(pool: Pool, layout: str) -> None:
    check(pool, _train, layout)


TWICE: dict[str, dict[str, Any]] = {
    "data": {},
    "data-fsdp": {"data_parallel": "fsdp"},
    "data-tensor": {"tensor_parallel_size": 2},
    "data-pipeline": {"pipeline_parallel_size": 2},
    "data-pipeline-fsdp": {"pipeline_parallel_size": 2, "data_parallel": "fsdp"},
}


def _train_whole(layout: dict[str, Any] | None, converted: bool) -> dict[str, Any]:
    """On the same 8 samples a step, of which two replicas take every other one."""
    data, options, strategy, sampler = Points(24), {}, None, None
    if layout is not None:
        replica = int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"])
        sampler = DistributedSampler(data, 2, replica, shuffle=False)
        strategy, options = partial(HybridParallelStrategy, data_parallel_size=2, **layout), {"sync_batchnorm": True}
    batches = DataLoader(data, 8 if layout is None else 4, sampler=sampler)
    return {
        "weights": trained(Normed(converted), batches, strategy, use_distributed_sampler=False, **options)["weights"]
    }


@long("data-pipeline-the Trainer")
@slow(but=["data-the module", "data-pipeline-the Trainer"])
@pytest.mark.parametrize("by", ["the module", "the Trainer"])
@pytest.mark.parametrize("layout", TWICE)
def test_on_cpu_it_is_one_devices_over_all_replicas(pool: Pool, layout: str, by: str) -> None:
    converted = by == "the module"
    (one,) = pool.run(1, _train_whole, None, converted)
    for found in pool.run(4 if len(layout) > 9 else 2, _train_whole, TWICE[layout], converted):
        assert not compare(one, found, 1e-9)


def test_its_gradients_are_a_batch_norms_also_where_a_rank_has_no_samples(pool: Pool) -> None:
    for error in pool.run(2, _differs):
        assert error < 1e-12


def _differs() -> float:
    """How far values, gradients and statistics are from a BatchNorm of all samples."""
    dist.init_process_group("gloo")
    rank, dtype = dist.get_rank(), torch.float64
    axis = Axis("data", (0, 1), rank, dist.group.WORLD)
    torch.manual_seed(0)
    worst = 0.0
    for samples in ((3, 3), (5, 1), (4, 0)):
        x, grad = torch.randn(2, sum(samples), 3, 4, dtype=dtype)
        norm = nn.BatchNorm1d(3, dtype=dtype)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        running = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
        own = slice(0, samples[0]) if rank == 0 else slice(samples[0], None)
        mine, weight, bias = (t.detach().clone().requires_grad_() for t in (x[own], norm.weight, norm.bias))
        y = synced_norm(mine, weight, bias, running, 0.1, norm.eps, axis)
        y.backward(grad[own])
        wanted = norm(x.requires_grad_())
        wanted.backward(grad)
        for part in (weight, bias):
            assert part.grad is not None
            axis.all_reduce_(part.grad, "test")
        pairs = [
            (y, wanted[own]), (mine.grad, x.grad[own]), (weight.grad, norm.weight.grad), (bias.grad, norm.bias.grad),  # type: ignore[index]
            (running[0], norm.running_mean), (running[1], norm.running_var),
        ]  # fmt: skip
        worst = max(worst, *(float((a - b).abs().amax()) for a, b in pairs if a.numel()))  # type: ignore[operator,union-attr]
    return worst
