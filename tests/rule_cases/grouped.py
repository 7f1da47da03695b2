"""Products of groups of rows. The kernels take no float64, and want rows of 16 bytes: four features or eight."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.helpers.rule_check import Case
from tests.rule_cases.data import normal

T, K, N, E = 10, 16, 24, 3
ENDS = torch.tensor([4, 4, T], dtype=torch.int32)


def floats(*shape: int) -> torch.Tensor:
    return normal(*shape, dtype=torch.float32)


def grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=ENDS)


CASES = [
    Case("experts", grouped, [floats(T, K), floats(E, K, N)], [(None, 2), (1, 1), (1, None), (None, 1)], leaves=False),
    Case(
        "experts, transposed",
        lambda a, b: torch._grouped_mm(a, b.transpose(-2, -1), offs=ENDS),
        [floats(T, K), floats(E, N, K)],
        [(None, 1), (1, 2)],
        leaves=True,
    ),
    Case("experts with few features a rank", grouped, [floats(T, 12), floats(E, 12, 20)], [(None, 2), (1, 1)]),
    Case("experts of sharded tokens", grouped, [floats(T, K), floats(E, K, N)], [(0, None), (None, 0)], local=False),
    Case(
        "experts by batch",
        lambda a, b: torch._grouped_mm(a, b),
        [floats(E, T, K), floats(E, K, N)],
        [(None, 2), (2, 1), (0, 0), (1, None)],
    ),  # fmt: skip
]
CASES = [replace(case, empty=False) for case in CASES]
