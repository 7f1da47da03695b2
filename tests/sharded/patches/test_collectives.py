"""Collectives of the user's own in a step that ranks share."""

from __future__ import annotations

import gc
import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import all_reduce as imported_all_reduce
from torch.distributed import distributed_c10d
from torch.distributed.nn import functional as differentiable
from torch.utils.data import DataLoader
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_par import HybridParallelStrategy, dry_run
from lightning_par.mesh.replicas import PURPOSE
from lightning_par.sharded import patches
from lightning_par.sharded.run_state import RunState
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.second_step import SecondStep
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, compare, trained

BATCHES = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(12, 8).mul(40).sin()
PIPELINE, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


def mean_of_all(x: Tensor) -> Tensor:
    """As DINO's losses keep their centre."""
    x = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


class Gathered(torch.autograd.Function):
    """As contrastive losses have the features of other processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Tensor:  # type: ignore[override]
        grads = grads.clone()
        dist.all_reduce(grads)
        return grads[dist.get_rank()]


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.centre
        self.centre = self.centre * 0.9 + mean_of_all(y.mean(0)) * 0.1
        return y


def _by_all_of_them(x: Tensor) -> Tensor:
    """A number for each feature by which every collective counts; [4, 8] to [8]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = torch.zeros_like(x[0])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        y = x.mean(0)
        work = dist.all_reduce(y, op, async_op=True)
        assert work is not None
        work.wait()
        found += y
    imported_all_reduce(y := x.amax(0))
    found += y
    dist.broadcast(y := x[0].clone(), src=size - 1)
    found += y * 0.3
    dist.reduce(y := x[1].clone(), dst=size - 1)
    found += y * 0.2 if rank == size - 1 else 0.0
    rows = [torch.zeros_like(x) for _ in range(size)]
    dist.all_gather(rows, x)
    found += sum(i * y.mean(0) for i, y in enumerate(rows)) + rows[rank][0]
    found += sum(y.amax(0) for i, y in enumerate(rows) if i != rank)  # as negatives leave one's own out
    dist.gather(x, rows if rank == 0 else None, dst=0)
    found += rows[-1].amin(0)
    dist.all_gather_into_tensor(whole := x.new_zeros(size * len(x), 8), x)
    found += whole.square().mean(0)
    parts = [x[i] * (1 + rank) for i in range(size)]
    dist.reduce_scatter(y := torch.zeros_like(x[0]), parts)
    found += y * 0.1
    dist.reduce_scatter_tensor(y := x.new_zeros(len(x) // size, 8), x)
    found += y.mean(0)
    dist.scatter(y := torch.zeros_like(x[0]), parts if rank == size - 1 else None, src=size - 1)
    found += y * 0.4
    dist.all_to_all_single(y := torch.zeros_like(x), x)
    found += y[0] * 0.7 + y[-1]
    dist.barrier()
    return found


def _of_one(x: Tensor) -> Tensor:
    """The same of one process."""
    return (
        4 * x.mean(0) + x.amax(0) + 0.3 * x[0] + 0.2 * x[1] + x[0] + x.amin(0) + x.square().mean(0)
        + 0.1 * x[0] + x.mean(0) + 0.4 * x[0] + 0.7 * x[0] + x[-1]
    )  # fmt: skip


def _by_other_names(x: Tensor) -> Tensor:
    """A number for each feature by what comes to the same functions in another way; [4, 8] to [8]."""
    rank, size = dist.get_rank(), distributed_c10d.get_world_size()
    assert 0 <= rank < size and not rank >= size and bool(rank) is (rank > 0) is (rank != 0)
    distributed_c10d.all_reduce(found := x.mean(0))
    found += apply_to_collection([x[0].clone()], Tensor, _reduced)[0]
    apply_to_collection(several := [x[1].clone(), x[0] * 2], Tensor, dist.all_reduce)
    found += several[0] * several[1]
    found += sum(i * y.mean(0) for i, y in enumerate(gather_all_tensors(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("_all_gather_base", "all_gather_single"):
            if hasattr(dist, name):  # which goes by the version of torch
                getattr(dist, name)(whole := x.new_zeros(size * len(x), 8), x)
                found += whole.square().mean(0)
        dist._reduce_scatter_base(y := x.new_zeros(len(x) // size, 8), x)
    dist.monitored_barrier()
    rows = [torch.zeros_like(x) for _ in range(size)]
    dist.all_gather(rows, x)
    for i, row in enumerate(rows):  # losses of pairs of processes
        found += row.mean(0) if i < rank else row.square().mean(0) if i > rank else 0.0
    one_hot = rank == torch.arange(size)
    for reduce in (_by_default, OF_A_DICT["sum"], partial(dist.all_reduce, op=dist.ReduceOp.SUM), OfAClass().reduce):
        reduce(mean := x.mean(0))
        found += mean
    return found + y.mean(0) + torch.stack(rows)[one_hot].sum((0, 1)) * (1 + dist.get_rank())


OF_A_DICT = {"sum": dist.all_reduce}


class OfAClass:
    reduce = staticmethod(dist.all_reduce)


def _by_default(x: Tensor, reduce: Any = dist.all_reduce, *, size: Any = dist.get_world_size) -> None:
    reduce(x)
    x /= size()


def _reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


class Talks(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Centred() if way == "layer" else nn.Linear(8, 8))
        self.register_buffer("centre", torch.zeros(8))
        self.processes = 1

    def setup(self, stage: str) -> None:
        if self.way == "counted" and dist.is_initialized():
            self.processes = dist.get_world_size()
        elif self.way == "environment":
            self.processes = int(os.getenv("WORLD_SIZE", 1))

    def on_train_start(self) -> None:
        if self.way == "other names":  # which count processes themselves, to gather from them
            differentiable.all_gather(torch.ones(1))
            gather_all_tensors(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net(batch)
        loss = (x - self.centre).square().mean()
        if self.way in ("centre", "counted", "environment"):
            self.centre = self.centre * 0.9 + mean_of_all(x.mean(0)) * 0.1
        elif self.way == "environment_in_step":
            total = x.mean(0).detach()
            if dist.is_initialized():
                dist.all_reduce(total)
            self.centre = total / int(os.environ.get("WORLD_SIZE", 1)) + int(os.environ.get("WORLD_SIZE", "1"))
        elif self.way == "gathered" and dist.is_initialized():
            loss = loss + Gathered.apply(x).logsumexp((0, 1)).sum()  # type: ignore[no-untyped-call]
        elif self.way == "gathered":
            loss = loss + x[None].logsumexp((0, 1)).sum()
        elif self.way == "collectives" and dist.is_initialized():
            loss = loss + (x.sum(0) * _by_all_of_them(x.detach())).mean()
        elif self.way == "other names":
            loss = loss + (x.sum(0) * _by_other_names(x.detach())).mean()
        elif self.way == "collectives":
            loss = loss + (x.sum(0) * _of_one(x.detach())).mean()
        elif self.way == "differentiable gather":
            rows = differentiable.all_gather(x) if dist.is_initialized() else [x]
            loss = loss + torch.cat(list(rows)).logsumexp(0).sum()
        elif self.way == "differentiable":
            loss = loss + (differentiable.all_reduce(x.mean(0)) if dist.is_initialized() else x.mean(0)).square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit(way: str, layout: dict[str, Any]) -> Any:
    return _fit_module(Talks(way), layout)


def _fit_module(module: LightningModule, layout: dict[str, Any]) -> Any:
    return trained(module, DataLoader(BATCHES, batch_size=4), partial(HybridParallelStrategy, **layout))


@long("pipeline-layer", "pipeline-gathered")
@slow("*-differentiable", "pipeline-centre", "tensor-layer", "pipeline-environment_in_step")
@pytest.mark.parametrize("way", ["centre", "gathered", "differentiable", "layer", "environment_in_step"])
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_ranks_that_share_the_model_are_one_process(way: str, layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit, way, layout)


COPIES: dict[str, dict[str, Any]] = {
    "pipeline": PIPELINE,
    "tensor": TENSOR,
    "sequence": {"sequence_parallel_size": 2},
    "cut": {**PIPELINE, "microbatches": 1},
    "fsdp": {**TENSOR, "data_parallel": "fsdp"},
    "pipeline-fsdp": {**PIPELINE, "data_parallel": "fsdp"},
}


WAYS = """
collectives|other names|centre|gathered|differentiable gather|differentiable|layer|environment_in_step
""".strip().split("|")
FAST = (
    "pipeline-collectives tensor-collectives tensor-other_names pipeline-fsdp-differentiable_gather sequence-gathered"
)


@long(but=["sequence-gathered"])
@slow(but=[row.replace("_", " ") for row in FAST.split()])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", COPIES)
def test_with_several_copies_each_is_one_process(way: str, layout: str, pool: Pool) -> None:
    """As it is to code of two replicas that share nothing."""
    two = pool.run(2, _fit, way, {"data_parallel_size": 2})
    for rank, found in enumerate(pool.run(4, _fit, way, {"data_parallel_size": 2, **COPIES[layout]})):
        assert not compare(two[rank // 2], found, 1e-9)


def _objects(layout: dict[str, Any]) -> Any:
    found: dict[str, Any] = {}

    class Objects(Talks):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            rank, size = dist.get_rank(), dist.get_world_size()
            gathered, one, mine = [None] * size, [rank], [None]
            dist.all_gather_object(gathered, f"of {int(rank)}")
            dist.broadcast_object_list(one, src=size - 1)
            dist.scatter_object_list(mine, [f"to {i}" for i in range(size)] if rank == 0 else None, src=0)  # type: ignore[arg-type]
            first, from_first = [None] * size if rank == 0 else None, [None]
            dist.gather_object(int(rank), first)
            dist.scatter_object_list(from_first, [*range(size)] if rank == 0 else None)  # type: ignore[arg-type]
            found.update(gathered=gathered, one=one, mine=mine, first=first, from_first=from_first)
            return super().training_step(batch, batch_idx)

    _fit_module(Objects("none"), layout)
    return found


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_objects_go_to_other_copies(layout: str, pool: Pool) -> None:
    if layout == "pipeline":
        with pytest.raises(RanksFailedError, match=r"all_gather_object` in a step of a pipeline with 2 copies of the"):
            pool.run(4, _objects, {"data_parallel_size": 2, **COPIES[layout]})
        return
    for rank, found in enumerate(pool.run(4, _objects, {"data_parallel_size": 2, **COPIES[layout]})):
        copy = rank // 2
        of_first = {"first": None if copy else [0, 1], "from_first": [copy]}
        assert found == {"gathered": ["of 0", "of 1"], "one": [1], "mine": [f"to {copy}"], **of_first}


def _fit_sending(how: str, layout: dict[str, Any]) -> Any:
    class Sends(Talks):
        def on_train_start(self) -> None:
            _exchange("P2POp")  # of processes

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            _exchange(how)
            return super().training_step(batch, batch_idx)

    return _fit_module(Sends("none"), layout)


def _exchange(how: str) -> None:
    x, next_one = torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size()
    if how == "send":
        dist.send(x, next_one)
    elif how == "isend":
        dist.isend(x, next_one)
    elif how == "new_group":
        dist.new_group([*range(dist.get_world_size())])
    else:
        operations = [dist.P2POp(dist.isend, x, next_one), dist.P2POp(dist.irecv, torch.empty(1), next_one)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


@slow(but=["P2POp", "new_group"])
@pytest.mark.parametrize("how", ["send", "isend", "P2POp", "new_group"])
def test_messages_to_a_process_are_refused(how: str, pool: Pool) -> None:
    name = "batch_isend_irecv" if how == "P2POp" else how
    with pytest.raises(
        RanksFailedError, match=rf"test_collectives.py:\d+: `torch.distributed.{name}` in a step in which"
    ):
        pool.run(2, _fit_sending, how, TENSOR)


def _functional(layout: dict[str, Any]) -> Any:
    class Sums(Talks):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            functional_collectives.all_reduce(batch.mean(), "sum", dist.group.WORLD)  # type: ignore[arg-type]
            return super().training_step(batch, batch_idx)

    return _fit_module(Sums("none"), layout)


@slow("pipeline")
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_functional_ones_of_all_processes_are_refused(layout: dict[str, Any], pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"_functional_collectives.all_reduce` in a step in which the ranks"):
        pool.run(2, _functional, layout)


@long()
@slow(but=["tensor-centre"])
@pytest.mark.parametrize("way", ["centre", "gathered", "layer"])
@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_a_dry_run_counts_what_they_send(layout: str, way: str, pool: Pool) -> None:
    asked = {"data_parallel_size": 2, **COPIES[layout]}
    counted = pool.run(4, _sent, way, asked)
    for rank, sent in enumerate(counted):
        found = dry_run(partial(Talks, way), BATCHES[:2].float(), asked, devices=4, rank=rank)
        assert found.sent.get(("data", PURPOSE), 0) == sent
    assert max(counted) > 0


def _sent(way: str, layout: dict[str, Any]) -> float:
    second = SecondStep()
    data: Any = DataLoader(BATCHES[:8].float(), batch_size=2)  # type: ignore[arg-type]
    trained(Talks(way), data, partial(HybridParallelStrategy, **layout), callbacks=[second], precision="32-true")
    return second.moved.sent("data", PURPOSE)


@slow("pipeline-environment", "tensor-counted")
@pytest.mark.parametrize("way", ["counted", "environment"])
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_a_number_of_processes_from_outside_of_steps_is_refused(layout: dict[str, Any], way: str, pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"test_collectives.py:\d+: `all_reduce` is called in a step.* outside"):
        pool.run(2, _fit, way, layout)


def test_a_copy_of_the_environment_asks_for_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with patches.COLLECTIVES.installed(), RunState.current.entered(copies_are_processes=True):
        assert (os.environ["WORLD_SIZE"], os.getenv("WORLD_SIZE"), os.environ.copy()["WORLD_SIZE"]) == ("1", "1", "2")
    with patches.COLLECTIVES.installed():
        before = RunState.current.counted_processes
        assert os.environ.copy()["WORLD_SIZE"] == "2" and RunState.current.counted_processes == before


class _Raises(Talks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise KeyError("no step")


def _plain_after_an_exception() -> list[bool]:
    before = [dist.all_reduce, dist.get_rank, imported_all_reduce]
    with pytest.raises(KeyError):
        _fit_module(_Raises("none"), {"data_parallel_size": 1, **TENSOR})
    gc.collect()
    return [a is b for a, b in zip(before, [dist.all_reduce, dist.get_rank, imported_all_reduce], strict=True)]


def test_after_an_exception_they_are_torchs_own(pool: Pool) -> None:
    assert pool.run(2, _plain_after_an_exception) == [[True] * 3] * 2


def _gather_unlike(where: str, how: str, layout: dict[str, Any]) -> Any:
    class Unlike(Talks):
        def on_train_epoch_start(self) -> None:
            if where == "hook":
                _gather_more_on_others(how, self)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if where == "step":
                _gather_more_on_others(how, self)
            return super().training_step(batch, batch_idx)

    return _fit_module(Unlike("none"), layout)


def _gather_more_on_others(how: str, module: LightningModule) -> None:
    rank, size = int(dist.get_rank()), dist.get_world_size()
    x = torch.ones(2 + (2 * rank >= size), 8, dtype=torch.float64)
    if how == "all_gather":
        dist.all_gather([torch.empty_like(x) for _ in range(size)], x)
    elif how == "all_gather_into_tensor":
        dist.all_gather_into_tensor(x.new_empty(size * len(x), 8), x)
    elif how == "gather":
        dist.gather(x, [torch.empty_like(x) for _ in range(size)] if rank == 0 else None)
    else:
        module.all_gather(x)


@slow(but=["fsdp-all_gather-step", "data_tensor-all_gather-hook", "data_pipeline-self.all_gather-step"])
@pytest.mark.parametrize("where", ["step", "hook"])
@pytest.mark.parametrize("how", ["all_gather", "all_gather_into_tensor", "gather", "self.all_gather"])
@pytest.mark.parametrize("layout", ["fsdp", "data_tensor", "data_pipeline"])
def test_tensors_that_are_not_alike_are_refused(layout: str, how: str, where: str, pool: Pool) -> None:
    """The back end ends the process, or hangs."""
    asked = {"fsdp": {"data_parallel": "fsdp"}, "data_tensor": TENSOR, "data_pipeline": PIPELINE}[layout]
    ranks, expected = 2 if layout == "fsdp" else 4, "ranks gather tensors that are not alike"
    with pytest.raises(RanksFailedError) as caught:
        pool.run(ranks, _gather_unlike, where, how, {"data_parallel_size": 2, **asked})
    told = [text for text in caught.value.reports.values() if expected in text]
    assert len(told) >= 2 and all("test_collectives.py:" in text for text in told)
    assert all("has one of shape (2, 8) and float64" in text and "shape (3, 8)" in text for text in told)


def _gather_like(layout: dict[str, Any]) -> bool:
    """Of one size in another shape, as back ends take it."""
    found = []

    class Like(Talks):
        def on_train_epoch_start(self) -> None:
            x = torch.ones((2, 3) if dist.get_rank() else (3, 2))
            dist.all_gather(rows := [torch.empty_like(x) for _ in range(dist.get_world_size())], x)
            work = dist.all_gather(again := [torch.empty_like(x) for _ in rows], x, async_op=True)
            assert work is not None
            work.wait()
            found.append(all(bool((row == 1).all()) for row in [*rows, *again]))

    _fit_module(Like("none"), layout)
    return all(found)


def test_tensors_of_one_size_in_other_shapes_are_gathered(pool: Pool) -> None:
    assert pool.run(2, _gather_like, {"data_parallel_size": 2}) == [True, True]
