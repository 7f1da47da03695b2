"""Gradients: averaged once a window whatever each rank left out, and clipped as one device clips them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.ledger import ledger
from lightning_par.mesh.positions import Positions
from lightning_par.optim.clipping import clip_by_norm, clip_by_value
from lightning_par.optim.gradient_sync import GradientSync
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.pool import Pool, RanksFailedError

SIZE = 3


def _axis() -> Axis:
    dist.init_process_group("gloo")
    return Axis("data", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


class Branches(nn.Module):
    """Uses the branches it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for i in used:
            x = torch.tanh(self.branches[i](x))
        return x.sum()


def _inputs(rank: int) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def _reference(steps: list[dict[int, list[int]]]) -> list[Tensor | None]:
    """Gradients of one device over the same per-replica batches; ``steps`` holds each rank's branches."""
    model = Branches()
    for step in steps:
        for rank, used in step.items():
            (model(_inputs(rank), used) / len(step)).backward()
    return [p.grad for p in model.parameters()]


def _sync(steps: list[dict[int, list[int]]], how: str) -> tuple[list[Tensor | None], int]:
    """One accumulation window of ``steps``; only the last one is not blocked."""
    axis, model = _axis(), Branches()
    sync = GradientSync(model, axis, bucket_bytes=300)
    with ledger() as moved:
        for i, step in enumerate(steps):
            sync.blocked = i < len(steps) - 1
            if how == "announced":
                sync.before_backward()
            model(_inputs(axis.rank), step[axis.rank]).backward()
            if how == "announced":
                sync.after_backward()
    sync.close()
    return [p.grad for p in model.parameters()], len(moved.select(purpose="gradients"))


def _cases() -> Iterator[Any]:
    everything = {rank: [0, 1, 2, 3] for rank in range(SIZE)}
    yield pytest.param([everything], "announced", id="all used")
    yield pytest.param([everything], "user's own backward", id="user's own backward")
    yield pytest.param([{rank: [3, 2, 1, 0][rank:] for rank in range(SIZE)}], "announced", id="other order")
    yield pytest.param([{0: [0], 1: [0, 1], 2: [2, 0]}], "announced", id="data-dependent branches")
    yield pytest.param([{0: [0], 1: [1], 2: [2]}], "announced", id="nothing in common")
    yield pytest.param([{0: [0, 1], 1: [1], 2: [3]}, {0: [3], 1: [1], 2: [0]}], "announced", id="a window of two")


@pytest.mark.parametrize(("steps", "how"), _cases())
def test_gradients_are_the_mean_of_the_replicas(pool: Pool, steps: list[dict[int, list[int]]], how: str) -> None:
    expected = _reference(steps)
    results = pool.run(SIZE, _sync, steps, how)
    for grads, _ in results:
        for got, want in zip(grads, expected):
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert len({calls for _, calls in results}) == 1


def _volume() -> tuple[int, int]:
    axis, model = _axis(), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    sync = GradientSync(model, axis)
    with ledger() as moved:
        for blocked in (True, True, False):
            sync.blocked = blocked
            sync.before_backward()
            model(torch.randn(2, 64)).sum().backward()
            sync.after_backward()
    assert len(moved.transfers) == 1  # whether there is a gradient of a parameter goes with them
    return sum(t.numel for t in moved.select(purpose="gradients")), sum(p.numel() + 1 for p in model.parameters())


def test_each_gradient_is_sent_once_a_window(pool: Pool) -> None:
    for sent, parameters in pool.run(2, _volume):
        assert sent == parameters


def _unfreeze() -> list[list[Tensor | None]]:
    axis, model = _axis(), Branches()
    sync, history = GradientSync(model, axis), []
    for frozen in ([0, 1], [0], []):
        for i, branch in enumerate(model.branches):
            branch.requires_grad_(i not in frozen)
        model.zero_grad()
        sync.before_backward()
        model(_inputs(axis.rank), [0, 1, 2, 3]).backward()
        sync.after_backward()
        history.append([p.grad for p in model.parameters()])
    return history


def test_parameters_may_be_frozen_and_unfrozen(pool: Pool) -> None:
    one, two = pool.run(2, _unfreeze)
    for a, b in zip(one, two):
        assert [x is None for x in a] == [y is None for y in b]
        assert all(torch.equal(x, y) for x, y in zip(a, b) if x is not None and y is not None)
    assert [sum(x is None for x in step) for step in one] == [4, 2, 0]


def _freeze_within() -> list[list[Tensor | None]]:
    """A branch that one rank alone takes is frozen within a window, and is still so in the next one."""
    axis, model = _axis(), Branches()
    sync, history = GradientSync(model, axis), []
    for number in range(4):
        model.branches[3].requires_grad_(number == 0)
        sync.blocked = number % 2 == 0
        sync.before_backward()
        model(_inputs(axis.rank), [0, 3] if (axis.rank, number) == (1, 0) else [0]).backward()
        sync.after_backward()
        if not sync.blocked:
            history.append([p.grad for p in model.parameters()])
            model.zero_grad()
    return history


def test_what_another_rank_has_of_a_parameter_that_is_frozen_within_a_window_is_in_the_mean(pool: Pool) -> None:
    first = _reference([{0: [0], 1: [0, 3]}, {0: [0], 1: [0]}])
    second = _reference([{0: [0], 1: [0]}, {0: [0], 1: [0]}])
    for history in pool.run(2, _freeze_within):
        for grads, expected in zip(history, (first, second), strict=True):
            assert [x is None for x in grads] == [x is None for x in expected]
            for got, want in zip(grads, expected, strict=True):
                if got is not None and want is not None:
                    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def _reentrant() -> None:
    axis, model = _axis(), Branches()
    sync = GradientSync(model, axis, bucket_bytes=1)
    x = _inputs(0).requires_grad_()
    sync.before_backward()
    for _ in range(2):
        x = checkpoint(model.branches[3], x, use_reentrant=True)
    x.sum().backward()


def test_reentrant_checkpointing_is_refused_where_it_would_lose_gradients(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"'branches\.3\..*' changed after it was sent.*use_reentrant=False"):
        pool.run(2, _reentrant)


def test_sparse_gradients_are_refused_before_training() -> None:
    axis = Axis("data", (0, 1), 0, None)
    with pytest.raises(ValueError, match=r"'1' is an Embedding with sparse=True.*data_parallel_size=1"):
        GradientSync(nn.Sequential(nn.Linear(1, 1), nn.Embedding(3, 2, sparse=True)), axis)


def _whole_gradients() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, dtype=torch.float64, generator=g) for s in ((5, 3), (4,), (2, 5)))  # type: ignore


def _clip(max_norm: float, norm_type: float) -> tuple[float, list[Tensor], int]:
    """Two parameters sharded unevenly over both ranks, one replicated."""
    axis = _axis()
    parameters = []
    for i, grad in enumerate(_whole_gradients()):
        p = nn.Parameter(torch.zeros_like(grad))
        if i == 1:
            p.grad = grad
            parameters.append(p)
            continue
        positions = Positions.of([0, 0, 1, 0, 1])
        index = torch.tensor([j for j in range(5) if int(positions.owner[j]) == axis.rank])
        local = p.detach().index_select(grad.shape.index(5), index).requires_grad_()
        local.grad = grad.index_select(grad.shape.index(5), index)
        parameters.append(ShardedTensor(local, grad.shape.index(5), positions, axis))  # type: ignore[arg-type]
    with ledger() as moved:
        norm = clip_by_norm(parameters, max_norm, norm_type)
    grads = [p.grad.full_tensor() if isinstance(p, ShardedTensor) else p.grad for p in parameters]  # type: ignore
    return norm.item(), grads, len(moved.select(purpose="clip"))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_the_norm_of_sharded_and_replicated_parameters_is_one_devices(
    pool: Pool, max_norm: float, norm_type: float
) -> None:
    whole = [nn.Parameter(torch.zeros_like(grad)) for grad in _whole_gradients()]
    for p, grad in zip(whole, _whole_gradients()):
        p.grad = grad
    expected = nn.utils.clip_grad_norm_(whole, max_norm, norm_type).item()
    for norm, grads, calls in pool.run(2, _clip, max_norm, norm_type):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert calls == 1
        for got, p in zip(grads, whole):
            torch.testing.assert_close(got, p.grad, rtol=1e-12, atol=0)


def test_clipping_without_gradients_changes_nothing() -> None:
    p = nn.Parameter(torch.ones(2))
    assert clip_by_norm([p], 1.0).item() == 0.0
    clip_by_value([p], 1.0)
    assert p.grad is None
