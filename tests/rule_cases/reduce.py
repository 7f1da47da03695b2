"""Reductions, and functions along one dim."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F

from tests.helpers.rule_check import Case
from tests.rule_cases.data import flags, integers, normal, unit

x = normal(4, 6, 3)
every = [(0,), (1,), (2,)]
holes = torch.where(flags(4, 6, 3), -math.inf, x).index_fill(1, torch.tensor([2]), 0.5)
nans = torch.where(flags(4, 6, 3) & flags(4, 6, 3), math.nan, x)
zeros = x * flags(4, 6, 1)
_LOWEST = torch.finfo(torch.float64).min
_hidden = flags(4, 6, 3).double().index_fill(0, torch.tensor([1]), 1.0)  # some rows altogether

CASES = [
    *[
        Case(f"{name} {label}", partial(call, name), [x], every)
        for name in ("sum", "nansum", "mean")
        for label, call in {
            "all": lambda name, x: getattr(x, name)(),
            "dim": lambda name, x: getattr(torch, name)(x, 1),
            "dims": lambda name, x: getattr(x, name)((0, -1)),
            "keepdim": lambda name, x: getattr(x, name)(dim=-2, keepdim=True),
            "positional keepdim": lambda name, x: getattr(torch, name)(x, [0, 1], True),
            "no dims": lambda name, x: getattr(x, name)(dim=()),
            "dtype": lambda name, x: getattr(x, name)(0, dtype=torch.float32),
            "axis": lambda name, x: getattr(x, name)(axis=1),
            "keepdims": lambda name, x: getattr(x, name)(axis=1, keepdims=True),
            "input": lambda name, x: getattr(torch, name)(input=x, dim=2),
        }.items()
    ],
    Case("sum of flags", lambda x: (x.sum(), x.sum(1)), [flags(4, 6)], [(0,), (1,)]),
    Case("sum of integers", lambda x: (x.sum(0), x.double().mean()), [integers(9, 4, 6)], [(0,), (1,)]),
    Case("mean of integers", lambda x: x.mean(0, dtype=torch.float64), [integers(9, 4, 6)], [(0,), (1,)]),
    Case("sum of a transposed", lambda x: x.mT.sum(1), [x], every),
    *[
        Case(f"{name} p={p}", partial(call, p), [zeros], every, local=None if p in (0, math.inf, 0.5) else True)
        for p in (0, 0.5, 1, 1.5, 2, 3, math.inf)
        for name, call in {
            "norm": lambda p, x: (
                x.norm(p),
                x.norm(p, dim=1),
                torch.norm(x, p, 2, True),
                x.norm(p, (0, 1), keepdim=True),
            ),
            "vector_norm": lambda p, x: (
                torch.linalg.vector_norm(x, p),
                torch.linalg.vector_norm(x, p, dim=-1, keepdim=True),
                torch.linalg.norm(x, p, 1),
            ),
        }.items()
    ],
    Case(
        "norm default",
        lambda x: (x.norm(), torch.norm(x, dim=1), x.norm("fro", (0, 1)), x.detach().float().norm(dtype=torch.float64)),
        [zeros],
        every,
    ),
    Case("linalg.norm", lambda x: (torch.linalg.norm(x), torch.linalg.norm(x, dim=1, keepdim=True)), [zeros], every),
    Case("linalg.norm of matrices", lambda x: torch.linalg.norm(x, 2), [normal(4, 6)], [(0,)], local=False),
    Case("norm nuc", lambda x: torch.norm(x, "nuc"), [normal(4, 6)], [(0,)], local=False),
    Case("amax", lambda x: (x.amax(1), torch.amin(x, (0, 2), keepdim=True), x.amax()), [x], every, local=None),
    Case(
        "amax no gradient",
        lambda x: (x.detach().amax(1), x.detach().amin((0, 1)), x.detach().amax(-1, keepdim=True)),
        [x],
        every,
        local=None,
    ),
    Case(
        "amax of NaN",
        lambda x: (x.detach().amax(1), x.detach().amin(0), x.detach().mT.amax(1)),
        [nans],
        every,
        local=None,
    ),
    Case("amax of integers", lambda x: (x.amax(0), x.amin(1), x.amax()), [integers(9, 4, 6)], [(0,), (1,)], local=None),
    Case(
        "any, all",
        lambda x: (x.any(), x.all(1), torch.any(x, 0, True), x.mT.all(dim=0, keepdim=True)),
        [flags(4, 6)],
        [(0,), (1,)],
    ),
    Case("max, min of all", lambda x: (x.detach().max(), torch.min(x.detach())), [x], every, local=None),
    Case("max of all integers", lambda x: (x.max(), x.min()), [integers(9, 4, 6)], [(0,), (1,)], local=None),
    Case("is any, is all", lambda x: (torch._is_any_true(x), torch._is_all_true(x)), [flags(4, 6)], [(0,), (1,)]),
    Case("any of floats", lambda x: (x.any(), x.any(1), x.all(0)), [zeros], every),
    Case("any of bytes", lambda x: (x.any(), x.all(1)), [flags(4, 6).to(torch.uint8)], [(0,), (1,)]),
    # Along one dim, first another than the sharded.
    *[
        Case(f"{name} of another dim", call, [unit(4, 6, 3)], [(0,), (2,)])
        for name, call in {
            "softmax": lambda x: (F.softmax(x, 1), torch.softmax(x, dim=1), x.softmax(-2, dtype=torch.float32)),
            "log_softmax": lambda x: (F.log_softmax(x, dim=1), x.log_softmax(1)),
            "softmin": lambda x: F.softmin(x, dim=1),
            "cumsum": lambda x: (x.cumsum(1), torch.cumsum(x, dim=-2)),
            "cumprod": lambda x: x.cumprod(1),
            "logcumsumexp": lambda x: x.logcumsumexp(1),
            "cummax": lambda x: x.cummax(1),
            "cummin": lambda x: torch.cummin(x, dim=1).values,
            "sort": lambda x: (*x.sort(1), torch.sort(x, dim=1, descending=True).values),
            "argsort": lambda x: (x.argsort(1), x.argsort(dim=1, descending=True)),
            "topk": lambda x: (*x.topk(2, 1), torch.topk(x, k=3, dim=1).indices),
            "max": lambda x: (*x.max(1), x.max(dim=1, keepdim=True).values, torch.min(x, 1).indices),
            "argmin": lambda x: (x.argmin(1), x.argmin(dim=1, keepdim=True), x.argmax(1)),
            "median": lambda x: x.median(1),
            "var": lambda x: (x.var(1), torch.var(x, dim=1, unbiased=False), x.var(1, correction=2, keepdim=True)),
            "std": lambda x: (x.std(1), torch.std(x, 1, keepdim=True), x.std((1,))),
            "prod": lambda x: (x.prod(1), torch.prod(x, dim=1, keepdim=True)),
            "logsumexp": lambda x: (x.logsumexp(1), torch.logsumexp(x, dim=(1,), keepdim=True)),
            "glu": lambda x: F.glu(x, 1),
            "flip": lambda x: (x.flip(1), torch.flip(x, dims=(1,)), x.flip([1])),
            "roll": lambda x: (x.roll(2, 1), torch.roll(x, shifts=1, dims=1)),
            "diff": lambda x: (x.diff(dim=1), torch.diff(x, 2, 1), x.diff(1, 1, x[:, :1], append=x[:, :1])),
        }.items()
    ],
    Case(
        "last by default",
        lambda x: (*x.sort(), x.argsort(), *x.topk(2), x.diff(), F.glu(x[..., :2])),
        [x],
        [(0,), (1,)],
    ),
    Case(
        "without a dim",
        lambda x: (
            x.max(),
            x.min(),
            x.argmax(),
            x.prod(),
            x.std(),
            x.var(False),
            x.median(),
            x.roll(1),
            x.roll(1, dims=1),
            torch.roll(x, shifts=(1, 2), dims=(0, 1)),
        ),
        [x],
        every,
        local=False,
    ),
    Case("max of two", lambda x, y: (torch.max(x, y), x.min(y)), [x, x + 1], [(0, 0), (0, None), (0, 1)], local=None),
    Case("reversed", lambda x: (x.flip(0, 1), x.flip((1, 2)), x.flip(0, 1, 2)), [x], every, local=None),
    *[
        Case(f"{name} along the sharded", call, [x], [(1,)], local=None)
        for name, call in {
            "cumsum": lambda x: (x.cumsum(1), x.cumprod(1)),
            "sort": lambda x: (*x.sort(1), *x.topk(2, 1), *x.max(1), x.sort(dim=1, stable=True).values),
            "axis": lambda x: (
                x.sum(axis=1),
                x.argmax(axis=1),
                torch.argmin(x, axis=1),
                x.std(1),
                x.logsumexp(1, True),
            ),
            "glu": lambda x: (F.glu(x, 1), x.diff(dim=1), x.roll(1, 1), x.flip(1), x.flip(1, 2), F.softmin(x, 1)),
        }.items()
    ],
    *[
        Case(f"{name} across", call, [values], every)
        for values in (x,)
        for name, call in {
            "softmax": lambda x: (F.softmax(x, 1), x.softmax(dim=-1), torch.softmax(x, 0)),
            "softmax dtype": lambda x: (F.softmax(x, 1, dtype=torch.float32), torch.softmax(x, 0, torch.float32)),
            "log_softmax": lambda x: (F.log_softmax(x, 1), x.log_softmax(2), torch.log_softmax(x, dim=0)),
            "softmax of float32": lambda x: F.softmax(x.float(), 1),
            "logsumexp": lambda x: (x.logsumexp(1), torch.logsumexp(x, (0, 1)), x.logsumexp(dim=-1, keepdim=True)),
            "logsumexp positional": lambda x: torch.logsumexp(x, 1, True),
        }.items()
    ],
    Case("softmax with -inf", lambda x: (F.softmax(x, 1), x.logsumexp(1)), [holes], every),
    Case(
        "softmax of the smallest", lambda x: (F.softmax(x, 1), F.log_softmax(x, 1)), [x.clamp(max=0) + _LOWEST], every
    ),
    Case("softmax of masked", lambda x: F.softmax(x + _hidden * _LOWEST, 1), [x], every),
    Case("softmax large", lambda x: (F.softmax(x, 1), F.log_softmax(x, 1), x.logsumexp(1)), [x * 1e4], every),
    Case("logsumexp of -inf alone", lambda x: x.detach().logsumexp(1), [torch.full((2, 4), -math.inf)], [(1,)]),
    Case("softmax of NaN", lambda x: F.softmax(x.detach(), 1), [nans], every),
    Case(
        "argmax",
        lambda x: (x.argmax(1), torch.argmax(x, dim=-1), x.argmax(0, True), x.argmax(dim=1, keepdim=True)),
        [x],
        every,
        local=None,
    ),
    Case("argmax ties", lambda x: (x.argmax(0), x.argmax(1)), [integers(3, 5, 7).double()], [(0,), (1,)], local=None),
    Case("argmax of NaN", lambda x: (x.argmax(0), x.argmax(1)), [nans], every, local=None),
    Case("argmax of integers", lambda x: x.argmax(1), [integers(3, 5, 7)], [(0,), (1,)], local=None),
]
