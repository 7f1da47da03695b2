"""Queries that see nothing: attention over a sharded sequence makes of them what one device does, in backward, too.

Torch's fused kernel on CPU weighs each key of such a row by 1 in backward where the mask adds `torch.finfo`'s smallest
number, by nothing where it adds -inf; the other one by 1 / n. A layout follows the one that one device takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.sequence.attention_arguments import read
from tests.helpers.sequence_ranks import SCHEMES, Call, check, leaf, normal, parts_on_rank, prepare
from tests.helpers.slow import slow
from tests.helpers.thread_ranks import run_ranks

B, T, S, D = 2, 13, 9, 3
schemes = pytest.mark.parametrize(("asked", "ranks"), SCHEMES, ids=str)
MIN = torch.finfo(torch.float64).min


def _seen(*shape: int) -> Tensor:
    """Which keys queries see: two of them none, one a single key."""
    seen = normal(*shape) > -0.5
    seen[..., 4, :] = seen[..., T - 1, :] = seen[..., 6, :] = False
    seen[..., 6, 5] = True
    return seen


def _masks(heads: int) -> dict[str, Tensor]:
    shapes = [(T, S), (B, 1, T, S), (B, heads, T, S), (heads, T, S)]
    masks = {f"bool {shape}": _seen(*shape) for shape in shapes}
    for name, low in (("smallest", MIN), ("smallest of float32", torch.finfo(torch.float32).min), ("-inf", -torch.inf)):
        masks |= {f"{name} {shape}": normal(*shape).masked_fill(~_seen(*shape), low) for shape in shapes}
    some = normal(T, S).masked_fill(~_seen(T, S), MIN)
    some[4, 3] = -torch.inf  # hidden for good
    keys = torch.zeros(B, 1, 1, S).double()
    keys[1] = MIN  # a sample of padding alone
    return masks | {"both": some, "a row for all": keys}


@slow(but=["False-ring-4", "True-ring-2", "False-ulysses-2", "True-all_gather-3"])
@schemes
@pytest.mark.parametrize("grouped", [False, True])
def test_rows_that_see_nothing(asked: Any, ranks: int, grouped: bool) -> None:
    heads = 2 * ranks
    q, k, v = normal(B, heads, T, D), *(normal(B, ranks if grouped else heads, S, D, seed=seed) for seed in (1, 2))
    for name, mask in _masks(heads).items():
        try:
            check(ranks, asked, Call((q, k, v), dict(attn_mask=mask, enable_gqa=grouped)))  # a mask without gradient
            if name.endswith(str((B, 1, T, S))) or name == "both":
                check(ranks, asked, Call((q, k, v, mask), dict(enable_gqa=grouped), "mixed", (-2, -2, -2)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("asked", ["ring", "all_gather", "ulysses"])
def test_where_one_device_takes_no_fused_kernel(asked: str) -> None:
    mask = normal(T, S).masked_fill(~_seen(T, S), MIN)
    turned = normal(B, 4, D, S).transpose(-2, -1)
    for inputs in (
        (normal(4, T, D), normal(4, S, D), normal(4, S, D)),
        (normal(2, B, 4, T, D), normal(2, B, 4, S, D), normal(2, B, 4, S, D)),
        (normal(B, 4, T, D), normal(1, 4, S, D), normal(1, 4, S, D)),
        (normal(B, 4, T, D), normal(B, 4, S, D), normal(B, 4, S, 2)),
        (normal(B, 4, T, D), turned, normal(B, 4, S, D)),
    ):
        # Cut, the keys would lie in order.
        layout = (None, -2, None) if inputs[1] is turned else (-2, -2, None)
        check(2, asked, Call(inputs, dict(attn_mask=mask), "zigzag", layout))


@pytest.mark.parametrize("low", ["smallest", "-inf", "-1e9"])
@schemes
def test_in_float32(asked: Any, ranks: int, low: str) -> None:
    value = {"smallest": torch.finfo(torch.float32).min, "-inf": -torch.inf, "-1e9": -1e9}[low]
    mask = torch.zeros(B, 1, T, S).masked_fill(~_seen(B, 1, T, S), value)
    inputs = tuple(normal(B, 2 * ranks, n, D, seed=n).float() for n in (T, S, S))
    check(ranks, asked, Call(inputs, dict(attn_mask=mask)), 1e-5)


def _fused(axis: Any) -> list[tuple[bool, bool]]:
    prepare(axis, "ring")
    q, k, one = normal(B, 4, T, D), normal(B, 4, S, D), normal(B, 1, S, D)
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, k), {}),
        ((q, one, one), {}),
        ((q, one, one), dict(enable_gqa=True)),
        ((q, k, one), dict(enable_gqa=True)),
        ((q, k[:1], k[:1]), {}),
        ((q[0], k[0], k[0]), {}),
        ((q, k, k[..., :2].contiguous()), {}),
        ((q, k, k), dict(dropout_p=0.5)),
        *(((q, k, k), dict(attn_mask=_seen(T, S).view(shape))) for shape in ((T, S), (1, T, S), (1, 1, T, S))),
        ((q, k, k), dict(attn_mask=normal(T, S).requires_grad_())),
    ]
    found = []
    for inputs, options in calls:
        given = parts_on_rank(axis, Call(inputs))[1]
        gqa, p = options.get("enable_gqa", False), options.get("dropout_p", 0.0)
        call = read(given[0], given[1], given[2], options.get("attn_mask"), False, p, gqa)  # type: ignore[arg-type]
        out = F.scaled_dot_product_attention(*map(leaf, inputs), **options)
        assert call is not None
        found.append((call.fused, "Flash" in type(out.grad_fn).__name__))
    return found


def test_which_kernel_one_device_takes_is_known() -> None:
    for found in run_ranks(2, _fused):
        assert [ours for ours, _ in found] == [theirs for _, theirs in found]
        assert {ours for ours, _ in found} == {True, False}
