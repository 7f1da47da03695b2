"""Attention over a sharded sequence: the kernel of a block, dropout, and what is in memory."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_par.sequence import kernel, ring
from lightning_par.sequence.attention import attention
from lightning_par.sequence.plain_kernel import Block
from lightning_par.sharded.run_state import RunState
from tests.helpers.sequence_ranks import SCHEMES, Call, grads_of, normal, parts_on_rank, prepare, run
from tests.helpers.thread_ranks import run_ranks

schemes = pytest.mark.parametrize(("asked", "ranks"), SCHEMES, ids=str)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_gives_outputs_and_sums(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = normal(2, 4, 5, 8).to(dtype), normal(2, 2, 7, 8).to(dtype), normal(1, 1, 7, 8).to(dtype)
    bias = (normal(5, 7) > 0)[None, None] if masked else None
    if bias is not None:
        bias[..., 2, :] = False
    out, lse = kernel.attend(q, k, v, Block(not masked, 0.3, bias))
    wide = torch.promote_types(dtype, torch.float32)
    assert out.dtype == lse.dtype == wide
    scores = 0.3 * q.to(wide) @ k.to(wide).repeat_interleave(2, 1).transpose(-2, -1)
    hidden = ~bias if bias is not None else torch.ones(5, 7, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0) @ v.to(wide))


@pytest.mark.parametrize(("name", "masked"), [("flash", False), ("efficient", False), ("efficient", True)])
def test_the_gpus_kernels_take_our_arguments(name: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone, which torch computes without a GPU."""
    monkeypatch.setattr(kernel, "_kernel", lambda *args: name)
    q, k = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    q, k = q.bfloat16(), k.bfloat16()
    block = Block(False, 0.3, torch.empty(1, 1, 5, 7, dtype=torch.bool, device="meta") if masked else None)
    out, lse = kernel.attend(q, k, k, block)
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == (q.shape, q.shape[:3], torch.float32, torch.float32)
    grads = kernel.attend_backward(out, q, k, k, out, lse, block)
    assert [grad.shape for grad in grads[:3] if grad is not None] == [q.shape, k.shape, k.shape]


def test_merging_knows_infinities_and_huge_sums() -> None:
    inf = math.inf
    sums = torch.tensor([[[-inf, -inf, 0.0, 0.0, 1e4, -1e4, math.log(3)]]], dtype=torch.float64)
    sums_b = torch.tensor([[[-inf, 2.0, -inf, 0.0, -1e4, 1e4, 0.0]]], dtype=torch.float64)
    out, out_b = torch.zeros(1, 1, 7, 1).double(), torch.ones(1, 1, 7, 1).double()
    kernel.merge_(out, sums, out_b, sums_b)
    assert out.flatten().tolist() == pytest.approx([0, 1, 0, 0.5, 0, 1, 0.25], abs=1e-15)
    assert sums.flatten().tolist() == pytest.approx([-inf, 2, 0, math.log(2), 1e4, 1e4, math.log(4)])


def _shows_dropout(axis: Any, asked: Any, kind: str) -> tuple[Tensor, Tensor]:
    """The dropped weights themselves, as the output and as the gradient of the values show them."""
    prepare(axis, asked)
    RunState.current.streams.begin_step(3, 4)
    T, heads = 24, 2 * axis.size
    inputs = (torch.zeros(2, heads, T, 3).double(), normal(2, heads, T, 3), torch.eye(T).double())
    call = Call(inputs, {}, kind, (-2, None, None))
    leaves, given = parts_on_rank(axis, call)
    before = torch.default_generator.get_state()
    value = leaves[2].expand(2, heads, T, T)
    out = attention(F.scaled_dot_product_attention, given[0], given[1], value, None, 0.25)
    (grad,) = torch.autograd.grad(out.local, value, torch.ones_like(out.local))
    assert torch.equal(torch.default_generator.get_state(), before)
    return out.local.detach(), grad


@schemes
def test_dropout_masks_are_drawn_again_and_differ_everywhere(asked: Any, ranks: int) -> None:
    parts = run_ranks(ranks, _shows_dropout, asked, "zigzag")
    weights = torch.cat([out for out, _ in parts], 2)  # a row for every query and head
    kept = (weights > 0).view(-1, 24)
    torch.testing.assert_close(weights.view(-1, 24)[kept], torch.full((int(kept.sum()),), 1 / (24 * 0.75)).double())
    assert 0.71 < kept.double().mean().item() < 0.79
    assert len(torch.unique(kept, dim=0)) > 0.98 * len(kept)  # by chance two of that many may be alike
    # dV = P' dO has the sums over the queries of the very same weights.
    total = sum(grad for _, grad in parts)
    torch.testing.assert_close(total, weights.sum(2).unsqueeze(-1).expand_as(total))


def _sum(axis: Any, asked: Any, step: float) -> tuple[float, float, list[Tensor]]:
    prepare(axis, asked)
    RunState.current.streams.begin_step(3, 4)
    call = Call(tuple(normal(2, 4, 12, 3, seed=seed) for seed in range(3)), dict(dropout_p=0.4))
    moved = [x + step * normal(*x.shape, seed=7) for x in call.inputs]
    call = Call(tuple(moved), call.options, "zigzag")
    leaves, given = parts_on_rank(axis, call)
    directions = parts_on_rank(axis, Call(tuple(normal(*x.shape, seed=7) for x in moved), {}, "zigzag"))[0]
    weights = parts_on_rank(axis, Call((call.grad(),) * 3, {}, "zigzag"))[0][0].detach()
    out = attention(F.scaled_dot_product_attention, *given, None, 0.4, True).local
    grads = grads_of(out, leaves, weights)
    slope = sum((g * d).sum().item() for g, d in zip(grads, directions) if g is not None)
    return (out * weights).sum().item(), slope, [out.detach(), *[g for g in grads if g is not None]]


@pytest.mark.parametrize("asked", ["ring", "all_gather", "ulysses"])
def test_gradients_under_dropout_are_differences(asked: str) -> None:
    low, here, high, again = (run_ranks(2, _sum, asked, step) for step in (-1e-5, 0.0, 1e-5, 0.0))
    difference = sum(b[0] - a[0] for a, b in zip(low, high)) / 2e-5
    assert difference == pytest.approx(sum(x[1] for x in here), rel=1e-7)
    assert all(torch.equal(a, b) for x, y in zip(here, again) for a, b in zip(x[2], y[2]))


def test_two_blocks_are_in_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[int, weakref.WeakSet[Tensor]] = {}
    most: list[int] = []

    def buffer(like: Tensor, size: int) -> Tensor:
        mine = alive.setdefault(threading.get_ident(), weakref.WeakSet())
        made = like.new_empty(size)
        mine.add(made)
        most.append(len(mine))
        assert size == 2 * like[..., :, :].numel()  # keys and values of one rank
        return made

    monkeypatch.setattr(ring, "_buffer", buffer)
    run_ranks(4, run, "ring", Call(tuple(normal(2, 4, 16, 3, seed=seed) for seed in range(3)), dict(is_causal=True)))
    assert len(most) == 4 * 2 * 2 and max(most) == 2
    assert not any(len(mine) for mine in alive.values())


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def _largest(axis: Any, asked: str, call: Call) -> int:
    prepare(axis, asked)
    leaves, given = parts_on_rank(axis, call)
    with _Largest() as made:
        out = attention(F.scaled_dot_product_attention, *given, **call.options).local
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    return made.numel


@pytest.mark.parametrize("causal", [True, False])
def test_no_scores_are_in_memory(causal: bool) -> None:
    call = Call(tuple(normal(1, 2, 256, 4, seed=seed) for seed in range(3)), dict(is_causal=causal))
    assert max(run_ranks(2, _largest, "ring", call)) == 2 * 2 * 128 * 4  # keys and values of one rank
