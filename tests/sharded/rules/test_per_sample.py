"""Functions in microbatches: their results together, and the sums of their gradients, are the whole batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.sharded.rules.sample_trial import acts_by_sample
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full
from tests.helpers.batch_calls import CALLS, Call

pytestmark = pytest.mark.filterwarnings("ignore")

N, M, C, T = 7, 3, 4, 5
x = CALLS["cosine_similarity"].samples[0]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _sharded(x: Tensor, dim: int, index: int) -> ShardedTensor:
    axis = MicrobatchAxis(M, index)
    return ShardedTensor(x, dim, axis.positions(N), axis)


def _microbatch(call: Call, index: int) -> tuple[list[Tensor], Any]:
    """Its leaves, and what it gives."""
    axis, positions = MicrobatchAxis(M, index), Positions.even(N, M)
    parts = [_leaf(x.index_select(call.dim, positions.index(index, x.device))) for x in call.samples]
    wholes = [_leaf(x) for x in call.wholes]
    return [*parts, *wholes], call.run(*(ShardedTensor(part, call.dim, positions, axis) for part in parts), *wholes)


def _backward(result: Tensor, like: Tensor, index: int | None = None) -> None:
    if like.requires_grad:
        seed = torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        if isinstance(result, ShardedTensor):
            seed = seed.index_select(result.sharded_dim, result.positions.index(result.axis.rank, seed.device))
            result = result.local
        result.backward(seed)


@pytest.mark.parametrize("name", CALLS)
def test_microbatches_make_the_batch(name: str) -> None:
    call = CALLS[name]
    leaves = [_leaf(x) for x in (*call.samples, *call.wholes)]
    whole = call.run(*leaves)
    _backward(whole, whole)
    runs = [_microbatch(call, index) for index in range(M)]
    for _, result in runs:
        _backward(result, whole)
    results = [result for _, result in runs]
    if isinstance(results[0], ShardedTensor):
        assert all(result.shape == whole.shape for result in results)
        joined = torch.empty_like(whole)
        for result in results:
            joined.index_copy_(
                result.sharded_dim, result.positions.index(result.axis.rank, whole.device), result.local.detach()
            )
    else:
        joined = torch.stack([result.detach() for result in results]).sum(0)
    torch.testing.assert_close(joined, whole.detach(), rtol=1e-9, atol=1e-9)
    for number, leaf in enumerate(leaves):
        if leaf.grad is None:
            continue
        grads = [parts[number].grad for parts, _ in runs]
        together = torch.cat(grads, call.dim) if number < len(call.samples) else torch.stack(grads).sum(0)
        torch.testing.assert_close(together, leaf.grad, rtol=1e-9, atol=1e-9)


MIXES: dict[str, Callable[[Tensor], Any]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "contrastive": lambda x: x @ x.T,
    "contrastive loss": lambda x: F.cross_entropy((x @ torch.ones(C, N).double()).T, torch.arange(N)),
    "std": lambda x: x.std(0),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "normalize": lambda x: F.normalize(x, dim=0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0),
    "topk": lambda x: x[:, 0].topk(2),
    "median": lambda x: x.median(),
    "triplet in the batch": lambda x: F.triplet_margin_loss(x, x[torch.arange(N).flip(0)], x),
    "another order": lambda x: x[torch.randperm(N)],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(6, 0),
    "roll by all": lambda x: x.roll(N, 0),
    "cdist": lambda x: torch.cdist(x, x),
    "cov": lambda x: torch.cov(x.T),
    "prod": lambda x: x.prod(0),
    "unique": lambda x: torch.unique(x > 0),
    "picked samples": lambda x: x[x[:, 0] > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "first sample": lambda x: x[0],
    "linear over samples": lambda x: F.linear(x.T, torch.ones(2, N).double(), torch.ones(2).double()),
    "addmm over samples": lambda x: torch.addmm(torch.ones(2).double(), x.T, torch.ones(N, 2).double()),
    "by frequency": lambda x: F.embedding(x.abs().long(), torch.ones(9, 2, requires_grad=True), None, None, 2, True),
    "one_hot of the largest": lambda x: F.one_hot(x.abs().long()),
    "a draw": lambda x: torch.poisson(x.abs()),
    "in place": lambda x: x.detach().index_fill_(0, torch.tensor([0]), 1.0),
    "targets of samples": lambda x: F.cross_entropy(x, x.argmax(1)),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_samples_is_refused(name: str) -> None:
    for index in range(M):
        with pytest.raises(SamplesMixError):
            _, result = _microbatch(Call(MIXES[name], (x,)), index)


EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(),
    "amax": lambda x: x.detach().amax(0),
    "any": lambda x: (x > 0).any(),
    "all true": lambda x: torch._is_all_true(x > 0),
    "argmax": lambda x: x.argmax(0),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_over_samples_is_counted_and_of_the_microbatch_alone(name: str) -> None:
    for index in range(M):
        axis, positions = MicrobatchAxis(M, index), Positions.even(N, M)
        part = x.index_select(0, positions.index(index, x.device))
        result = EXTREMES[name](ShardedTensor(part, 0, positions, axis))
        assert axis.sums and type(result) is Tensor
        if name != "argmax":  # which gives a place in the whole
            assert torch.equal(result, EXTREMES[name](part))


def test_the_trial_of_fake_tensors_is_real() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with FakeTensorMode():
        part = torch.empty(3, T, C, requires_grad=True)
        out = torch.diagonal(_sharded(part, 0, 0), 0, 1, 2)
        assert out.shape == (N, C) and out.local.shape == (3, C)
        with pytest.raises(SamplesMixError):
            torch.cov(_sharded(torch.empty(3, C), 0, 0))
    assert torch.equal(state, torch.get_rng_state())


def test_a_trial_of_too_much_takes_few_samples() -> None:
    part = torch.empty(1000, 3000, 5)
    axis = MicrobatchAxis(M, 1)
    big = ShardedTensor(part, 0, Positions.even(3 * len(part), M), axis)
    found = acts_by_sample(torch.diagonal, (big, 0, 1, 2), {})
    assert found is not None and found.shapes == ((3000, 5),)
    assert acts_by_sample(torch.roll, (big, 30, 0), {}) is None


def test_zeros_show_nothing_of_whole_numbers() -> None:
    """A sum of zeros is that of its parts."""
    x = ShardedTensor(torch.ones(2, 3, dtype=torch.int64), 0, Positions.even(8, 4), MicrobatchAxis(4, 0))
    assert acts_by_sample(torch.cumsum, (x, 0), {}) is None
    assert acts_by_sample(torch.cumsum, (x, 1), {}) is not None


def test_a_row_is_drawn_by_its_own_microbatch() -> None:
    RunState.current.streams.begin_step(seed=1, step=0)
    try:
        state = torch.get_rng_state()
        for draw in (lambda x: F.dropout2d(x, 0.5), lambda x: F.gumbel_softmax(x), _multinomial):
            parts = [full_local(draw(_sharded(torch.ones(3, 16, 16), 0, index))) for index in (0, 0)]
            assert not torch.equal(*parts), "two events draw alike"
        assert torch.equal(state, torch.get_rng_state())
    finally:
        RunState.current.streams.end_step()


def _multinomial(x: Tensor) -> Tensor:
    return torch.multinomial(x[:, 0], 8)


def full_local(x: Any) -> Tensor:
    assert isinstance(x, ShardedTensor) and x.shape[0] == N
    return x.local


def test_the_whole_is_not_to_be_had() -> None:
    with pytest.raises(SamplesMixError):
        full(_sharded(torch.ones(3, 2), 0, 0))


def test_a_part_of_a_part_is_not_none() -> None:
    """As a microbatch of a layer's activations that ranks share is asked."""
    inner = _sharded(torch.ones(4, N), 1, 0)
    outer = _sharded(inner, 0, 0)
    assert (outer == None) is False and (outer != None) is True  # noqa: E711
    assert isinstance(outer == outer, ShardedTensor)
