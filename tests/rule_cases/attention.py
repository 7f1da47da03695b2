"""Attention with its heads sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case, Shard
from tests.rule_cases.data import flags, normal

B, H, T, S, D = 2, 4, 3, 5, 2
E = H * D
q, k, v = normal(B, H, T, D), normal(B, H, S, D), normal(B, H, S, D)
sdpa = F.scaled_dot_product_attention
heads = [(1, 1, 1), (0, 0, 0), (1, None, None), (1, 1, None), (None, 1, 1), (None, None, 1)]
_keep = torch.tensor([[True, False, True, True, False]])  # no row is masked altogether


def _mha(
    need_weights: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_weight: Any,
    in_bias: Any,
    out_weight: Tensor,
    out_bias: Tensor,
    *masks: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if isinstance(in_weight, tuple):
        options |= dict(
            zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), in_weight), use_separate_proj_weight=True
        )
        in_weight = None
    return F.multi_head_attention_forward(
        query,
        key,
        value,
        E,
        H,
        in_weight,
        in_bias,
        None,
        None,
        False,
        0.0,
        out_weight,
        out_bias,
        need_weights=need_weights,
        **options,
    )


def _self(need_weights: bool, x: Tensor, *weights: Tensor, **options: Any) -> Any:
    return _mha(need_weights, x, x, x, *weights, **options)


def _separate(
    need_weights: bool, q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *others: Tensor
) -> Any:
    return _mha(need_weights, q, k, v, (wq, wk, wv), *others)


x, memory = normal(T, B, E), normal(S, B, E)
packed = [normal(3 * E, E), normal(3 * E), normal(E, E), normal(E)]
_packed = (Shard(0, D, 3), Shard(0, D, 3), Shard(1, D), None)
_causal = torch.ones(T, T, dtype=torch.bool).triu(1)
_padding = torch.zeros(B, T, dtype=torch.bool)
_padding[0, -1] = True
_masks: dict[str, dict[str, Any]] = {
    "": {},
    "bool mask": {"attn_mask": _causal},
    "float mask": {"attn_mask": normal(T, T)},
    "mask a head": {"attn_mask": normal(B * H, T, T)},
    "padding": {"key_padding_mask": _padding},
    "float padding": {"key_padding_mask": normal(B, T)},
    "both": {"attn_mask": _causal, "key_padding_mask": _padding},
    "causal": {"attn_mask": _causal, "is_causal": True},
    "causal, whatever the mask says": {"attn_mask": normal(T, T), "is_causal": True},
    "causal float": {
        "attn_mask": torch.zeros(T, T).double().masked_fill(_causal, -torch.inf),
        "is_causal": True,
        "key_padding_mask": _padding,
    },
    "every head's weights": {"average_attn_weights": False},
    "not training": {"training": False},
}

CASES = [
    Case("sdpa", sdpa, [q, k, v], heads),
    Case("sdpa other layouts", sdpa, [q, k, v], [(2, None, None), (1, 0, 0), (3, 3, 3)], local=False),
    Case("sdpa causal", partial(sdpa, is_causal=True), [q, k, v], heads),
    Case("sdpa scale", partial(sdpa, scale=0.3), [q, k, v], heads),
    *[
        Case(
            f"sdpa mask {tuple(mask.shape)} {mask.dtype}",
            lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
            [q, k, v, mask],
            [(1, 1, 1, None), (0, 0, 0, None)],
        )
        for mask in (
            _keep.expand(T, S),
            _keep.expand(1, 1, T, S),
            _keep.expand(B, 1, 1, S),
            _keep.expand(B, H, T, S),
            _keep.expand(H, T, S),
            normal(T, S),
            normal(B, 1, T, S),
            normal(H, T, S),
            normal(1, H, T, S),
            normal(B, H, 1, S),
            normal(S),
        )
    ],
    Case("sdpa sharded mask", sdpa, [q, k, v, normal(H, T, S)], [(1, 1, 1, 0), (1, None, 1, 0), (None, None, None, 0)]),
    Case("sdpa of three dims", sdpa, [normal(H, T, D), normal(H, S, D), normal(H, S, D)], [(0, 0, 0), (0, None, None)]),
    Case(
        "sdpa GQA",
        partial(sdpa, enable_gqa=True),
        [q, normal(B, 2, S, D), normal(B, 2, S, D)],
        [(Shard(1, 2), 1, 1), (0, 0, 0), (Shard(1, 2), None, None), (None, 1, 1), (None, None, 1)],
    ),
    Case(
        "sdpa GQA uneven",
        partial(sdpa, enable_gqa=True),
        [q, normal(B, 2, S, D), normal(B, 2, S, D)],
        [(1, 1, 1), (1, None, None)],
        local=None,
    ),
    Case("sdpa GQA of equal heads", partial(sdpa, enable_gqa=True), [q, k, v], heads),
    Case("sdpa MQA", partial(sdpa, enable_gqa=True), [q, normal(B, 1, S, D), normal(B, 1, S, D)], [(1, None, None)]),
    Case("sdpa broadcast heads", sdpa, [q, normal(B, 1, S, D), normal(B, 1, S, D)], [(1, None, None), (0, 0, 0)]),
    *[
        Case(
            f"mha self {need_weights} {label}",
            partial(_self, need_weights, **options),
            [x, *packed],
            [(None, *_packed)],
        )
        for need_weights in (True, False)
        for label, options in _masks.items()
    ],
    *[
        Case(f"mha {label} {need_weights}", partial(call, need_weights), inputs, layouts, leaves=True)
        for need_weights in (True, False)
        for label, call, inputs, layouts in (
            ("self leaves", _self, [x, *packed], [(None, *_packed)]),
            (
                "no bias",
                lambda n, x, w, o: _self(n, x, w, None, o, None),
                [x, packed[0], packed[2]],
                [(None, Shard(0, D, 3), Shard(1, D))],
            ),
            ("cross", lambda n, x, m, *w: _mha(n, x, m, m, *w), [x, memory, *packed], [(None, None, *_packed)]),
            ("three", _mha, [x, memory, normal(S, B, E), *packed], [(None, None, None, *_packed)]),
            ("unbatched", _self, [normal(T, E), *packed], [(None, *_packed)]),
            (
                "unbatched cross",
                lambda n, x, m, *w: _mha(n, x, m, m, *w, attn_mask=flags(T, S) & False),
                [normal(T, E), normal(S, E), *packed],
                [(None, None, *_packed)],
            ),
            (
                "unbatched masks",
                partial(_self, attn_mask=normal(H, T, T), key_padding_mask=_padding[0]),
                [normal(T, E), *packed],
                [(None, *_packed)],
            ),
            (
                "kdim, vdim",
                _separate,
                [x, normal(S, B, 6), normal(S, B, 5), normal(E, E), normal(E, 6), normal(E, 5), *packed[1:]],
                [(None, None, None, Shard(0, D), Shard(0, D), Shard(0, D), *_packed[1:])],
            ),
        )
    ],
    Case(
        "mha out alone",
        partial(_self, True),
        [x, *packed],
        [(None, None, None, Shard(1, D), None), (None, None, None, None, 0)],
        local=None,
    ),
    Case(
        "mha batch",
        partial(_self, False),
        [x, *packed],
        [(1, None, None, None, None), (0, None, None, None, None)],
        local=None,
    ),
]
