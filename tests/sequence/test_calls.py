"""What code around attention over a sharded sequence relies on: gradients, casts, strides, errors, real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.ledger import ledger
from lightning_par.sequence.attention import attention
from lightning_par.sequence.blocks import zigzag
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.pool import Pool
from tests.helpers.sequence_ranks import PRODUCT, Call, joined, normal, on_one_device, on_rank, parts_on_rank, prepare
from tests.helpers.thread_ranks import run_ranks


def _needs(axis: Any, asked: str, wanted: tuple[bool, bool, bool]) -> None:
    prepare(axis, asked)
    call = Call(tuple(normal(2, 4, 16, 3, seed=seed) for seed in range(3)), dict(is_causal=True))
    leaves, given = parts_on_rank(axis, call)
    for x, needed in zip(leaves, wanted):
        x.requires_grad_(needed)
    out = attention(F.scaled_dot_product_attention, *given, is_causal=True).local
    if any(wanted):
        out.sum().backward()
    assert [x.grad is not None for x in leaves] == list(wanted)


@pytest.mark.parametrize("asked", ["ring", "all_gather", "ulysses"])
def test_only_gradients_that_are_needed_are_sent(asked: str) -> None:
    sent = {}
    for wanted in ((False, False, False), (True, False, False), (True, True, False), (False, False, True), (True,) * 3):
        with ledger() as moved:
            run_ranks(2, _needs, asked, wanted)
        sent[wanted] = moved.sent() / (8 * 2 * 2 * 4 * 16 * 3 / 4)  # one of q, k, v turned or half of it passed on
    if asked == "ulysses":  # query, key, value, output; backward the output's gradient and what is asked for
        assert list(sent.values()) == [4, 6, 7, 6, 8]
    else:  # two forward, again two backward, and what is asked for
        assert list(sent.values()) == [4, 8, 10, 10, 12]


def _recomputes(axis: Any, asked: str) -> None:
    prepare(axis, asked)
    call = Call(tuple(normal(2, 4, 16, 3, seed=seed) for seed in range(3)))
    leaves, given = parts_on_rank(axis, call)

    def local(*parts: Tensor) -> Tensor:
        sharded = (like.with_local(part) for like, part in zip(given, parts))  # type: ignore[attr-defined]
        return attention(F.scaled_dot_product_attention, *sharded, is_causal=True).local

    plain = local(*leaves)
    recomputed = torch.utils.checkpoint.checkpoint(local, *leaves, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(recomputed.sum(), leaves), torch.autograd.grad(plain.sum(), leaves)):
        assert torch.equal(x, y)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(local(*leaves), plain)


@pytest.mark.parametrize("asked", ["ring", "all_gather", "ulysses"])
def test_recomputed_and_without_gradients(asked: str) -> None:
    run_ranks(2, _recomputes, asked)


def _casts(axis: Any, asked: str) -> None:
    prepare(axis, asked)
    q, k, v = (normal(2, 4, 16, 8, seed=seed).float() for seed in range(3))
    call = Call((q, k, v), dict(is_causal=True))
    leaves, given = parts_on_rank(axis, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(F.scaled_dot_product_attention, given[0], given[1].bfloat16(), given[2], is_causal=True)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.local.float().sum().backward()
    assert out.dtype == expected.dtype == torch.bfloat16
    assert [x.grad.dtype for x in leaves if x.grad is not None] == [torch.float32] * 3


@pytest.mark.parametrize("asked", ["ring", "ulysses"])
def test_autocast_casts_as_torch_does(asked: str) -> None:
    run_ranks(2, _casts, asked)


def _strides(axis: Any, asked: str) -> None:
    prepare(axis, asked)
    x, positions = normal(2, 16, 4, 3), zigzag(16, axis.size)
    whole = x.transpose(1, 2)
    local = x.index_select(1, positions.index(axis.rank, x.device)).transpose(1, 2)
    given = ShardedTensor(local, 2, positions, axis)
    for options in ({}, dict(dropout_p=0.5), dict(attn_mask=normal(16, 16) > 0)):
        out = attention(F.scaled_dot_product_attention, given, given, given, **options)
        expected = F.scaled_dot_product_attention(whole, whole, whole, **options)
        assert out.local.is_contiguous() == expected.is_contiguous()
        assert out.local.transpose(1, 2).is_contiguous() == expected.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("asked", ["ring", "ulysses"])
def test_results_lie_in_memory_as_torchs_do(asked: str) -> None:
    run_ranks(2, _strides, asked)


def _refused(axis: Any) -> list[Any]:
    prepare(axis, "ring")
    q = normal(2, 4, 16, 3)
    given = parts_on_rank(axis, Call((q, q, q)))[1]
    whole = q.detach()
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((given[0], given[1], given[2], torch.ones(16, 16)), dict(is_causal=True)),
        ((given[0], given[1].float(), given[2]), {}),
        ((given[0], whole[..., :2], whole), {}),
        ((given[0], whole[:, :3], whole[:, :3]), dict(enable_gqa=True)),
        ((given[0], whole[:, :2], whole[:, :2]), {}),
        ((given[0], given[1], given[2], torch.ones(5, 16)), {}),
        ((given[0], given[1], given[2]), dict(dropout_p=1.5)),
        ((given[0], ShardedTensor(given[1].local, 2, given[1].positions, Axis("x", (0,), 0, None)), whole), {}),
    ]
    return [attention(F.scaled_dot_product_attention, *args, **options) for args, options in wrong]


def test_what_torch_refuses_is_left_to_it() -> None:
    for answers in run_ranks(2, _refused):
        assert all(answer is NotImplemented for answer in answers)


def _fails_by_name(axis: Any) -> None:
    prepare(axis, "ulysses")
    q = normal(2, 4, 16, 3)
    attention(F.scaled_dot_product_attention, *parts_on_rank(axis, Call((q, q[:, :1], q[:, :1])))[1])


def test_an_impossible_scheme_is_refused() -> None:
    with pytest.raises(AssertionError, match="1 key/value head can't be spread over 2 ranks"):
        run_ranks(2, _fails_by_name)


def _process_axis(axis: Axis, name: str, ranks: tuple[int, ...], rank: int) -> Axis:
    part = Axis(name, ranks, rank, _groups[ranks])
    part.gradient_shares = True
    return part


_groups: dict[tuple[int, ...], Any] = {}


def _in_processes(calls: list[tuple[Any, Call]]) -> list[tuple[list[Tensor | None], float]]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    _groups.clear()
    for line in ((0, 1), (2, 3), (0, 2), (1, 3)) if size == 4 else ():
        _groups[line] = dist.new_group(list(line))
    results = []
    for asked, call in calls:
        axis = Axis("sequence", tuple(range(size)), rank, dist.group.WORLD)
        prepare(axis, asked, _process_axis)
        with ledger() as moved:
            results.append((on_rank(axis, call), moved.sent(purpose="attention")))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes(pool: Pool, ranks: int) -> None:
    even = tuple(normal(2, 4, 16, 3, seed=seed) for seed in range(3))
    uneven = (normal(2, 4, 13, 3), normal(2, 4, 9, 3, seed=1), normal(2, 4, 9, 3, seed=2))
    masked = (*uneven, normal(1, 4, 13, 9))
    asked = ["ring", "all_gather", "ulysses", *([PRODUCT] if ranks == 4 else [])]
    calls = []
    for scheme in asked:
        calls += [(scheme, Call(even, dict(is_causal=True))), (scheme, Call(masked, {}, "gap", (-2, -2, -2)))]
        calls.append((scheme, Call(tuple(x.bfloat16() for x in uneven), dict(is_causal=True))))
    answers = pool.run(ranks, _in_processes, calls)
    for number, (scheme, call) in enumerate(calls):
        results = [answer[number][0] for answer in answers]
        low = call.inputs[0].dtype == torch.bfloat16
        for got, expected in zip(joined(results, call), on_one_device(call)):
            assert got is not None and expected is not None
            torch.testing.assert_close(got, expected, rtol=2e-2 if low else 1e-11, atol=2e-2 if low else 1e-11)
        if call.options and not low:
            assert [answer[number][1] for answer in answers] == pytest.approx([_bytes(scheme, ranks)] * ranks)


def _bytes(scheme: Any, c: int) -> float:
    numel = 2 * 16 * 4 * 3  # b s h
    u, r = (2, 2) if scheme == PRODUCT else (c, 1) if scheme == "ulysses" else (1, c)
    return 8 * (8 * numel * (u - 1) / (u * c) + 4 * numel / u * (r - 1) / r)  # so few stay for backward
