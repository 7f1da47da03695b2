"""Picking and placing along another dim than the sharded one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.helpers.rule_check import Case
from tests.rule_cases.data import flags, integers, normal

N, C, L = 6, 4, 8
line, rows, rows_and_channels = normal(N, C, L), [(0,)], [(0,), (1,)]


def _filled(x: Tensor, flags: Tensor) -> Tensor:
    x[flags] = 2.0
    return x


CASES = [
    Case(
        "gather beside",
        lambda x, i: (x.gather(1, i), torch.take_along_dim(x, i, 1)),
        [normal(N, C), integers(C, N, 3)],
        [(0, None), (0, 0), (None, 0)],
    ),
    Case(
        "scatter",
        lambda x, i, s: (
            x.scatter(1, i, s),
            x.scatter(1, i, 2.0),
            torch.scatter(x, 1, i, value=3.0),
            x.scatter_add(1, i, s),
            x.scatter_reduce(1, i, s, "sum"),
            (x * 1).scatter_(1, i, s),
            (x * 1).scatter_add_(1, i, s),
            (x * 1).scatter_reduce_(1, i, s, reduce="sum"),
        ),
        [normal(N, C), torch.rand(N, C).argsort(1), normal(N, C)],
        [(0, None, None), (0, 0, 0)],
    ),
    Case(
        "scatter across",
        lambda x, i, s: x.scatter_add(0, i, s),
        [normal(N, C), integers(N, N, C), normal(N, C)],
        [(0, None, None)],
        local=False,
    ),
    Case(
        "index_add",
        lambda x, s: (
            x.index_add(1, torch.tensor([2, 0]), s, alpha=2),
            (x * 1).index_add_(1, torch.tensor([2, 0]), s),
            x.index_copy(1, torch.tensor([2, 0]), s),
            (x * 1).index_copy_(1, torch.tensor([2, 0]), s),
        ),
        [normal(N, C), normal(N, 2)],
        [(0, None), (0, 0)],
    ),
    Case("index_select", lambda x: x.index_select(1, torch.tensor([3, 0, 3])), [line], [(0,), (2,)]),
    Case("index_select across", lambda x: x.index_select(0, torch.tensor([3, 0, 3])), [line], rows, local=False),
    Case("repeat", lambda x: (x.repeat(2, 1, 3, 1), x.tile(2), torch.tile(x, (3, 1, 1))), [line], [(0,), (1,), (2,)]),
    Case("broadcast_to", lambda x: x.broadcast_to(3, N, C), [normal(N, C)], rows_and_channels),
    Case(
        "each row's own",
        lambda x, i: (x[torch.arange(N), i], x[torch.arange(N)[:, None], i[:, None]]),
        [line, integers(C, N)],
        [(0, None), (0, 0)],
        local=None,
    ),
    Case(
        "each row's own, another order",
        lambda x, i: x[torch.arange(N).flip(0), i],
        [line, integers(C, N)],
        [(0, None)],
        local=False,
    ),
    Case(
        "several of each row",
        lambda x: (x[torch.arange(N)[:, None], torch.tensor([[3, 0, 3]])], x[torch.tensor(1), torch.tensor([2, 0])]),
        [line],
        [(1,)],
        local=None,
    ),
    Case(
        "picked beside",
        lambda x: (
            x[torch.tensor([2, 0, 2])],
            x[torch.tensor(1)],
            x[torch.tensor([[1], [0]]), :, torch.tensor([3, 1])],
            x[torch.tensor([5, 0]), ..., 2:],
            x[None, [torch.tensor(3), 1][0], :, 1],
            x[x.new_zeros(N) == torch.arange(N), :, :3],
        ),
        [line],
        [(1,)],
    ),
    Case(
        "picked before and behind",
        lambda x: (x[:, torch.tensor([1, 0])], x[..., torch.tensor([1, 0]), 0], x[:, torch.tensor([True, False] * 2)]),
        [line],
        [(0,)],
    ),
    Case("picked across", lambda x: x[torch.tensor([2, 0, 2])], [line], [(0,)], local=False),
    Case("fill flagged", lambda x, m: _filled(x * 1, m), [line, flags(N, C)], [(0, None), (0, 0)]),
]
CASES = [replace(case, empty=False) for case in CASES]
