"""What functions return where another rank has what they are given: told from memory, it is what torch would tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.mesh.layout import Layout, lone_groups
from lightning_par.optim import away_results
from lightning_par.optim.away_results import AwayResults
from lightning_par.optim.function_facts import function_of

ORIGIN = Origin("a weight", (1,), lone_groups(Layout(pipeline=2)).pipeline)
X, N, SCALAR = torch.ones(3, 1), torch.ones(3, 1, dtype=torch.int64), torch.ones((), dtype=torch.float64)
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.Tensor.add, (X, X), {"alpha": 2}),
    (torch.Tensor.add, (X, torch.ones(4)), {}),
    (torch.Tensor.mul, (X, SCALAR), {}),
    (torch.Tensor.mul, (N, SCALAR), {}),
    (torch.Tensor.mul, (N, 2), {}),
    (torch.Tensor.mul, (N, 2.0), {}),
    (torch.Tensor.mul, (N, True), {}),
    (torch.Tensor.mul, (X, 2j), {}),
    (torch.Tensor.sqrt, (N,), {}),
    (torch.clamp, (X,), {"min": 0.0, "max": None}),
    (torch.Tensor.clone, (X,), {}),
    (torch.Tensor.to, (X, torch.float16), {}),
    (torch.Tensor.gt, (X, 0), {}),
]


def test_a_function_tells_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    results, asked = AwayResults(), []
    on_meta = away_results.on_meta

    def ask(func: Any, *given: Any) -> Any:
        asked.append(func)
        return on_meta(func, *given)

    monkeypatch.setattr(away_results, "on_meta", ask)
    for _ in range(2):
        for func, args, kwargs in CALLS:
            away = (Elsewhere(args[0].shape, args[0].dtype, args[0].device, ORIGIN), *args[1:])
            found, expected = results.away(func, function_of(func), away, kwargs, ORIGIN), func(*args, **kwargs)
            assert type(found) is Elsewhere and (found.shape, found.dtype) == (expected.shape, expected.dtype), func
    assert len(asked) < 2 * len(CALLS) - 6  # most of them once
