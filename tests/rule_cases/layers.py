"""Embedding and normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.helpers.rule_check import Case
from tests.rule_cases.data import flags, integers, normal

ids, table = integers(7, 3, 5), normal(7, 4)
x = normal(2, 3, 4)
rows = [(0, None, None), (1, None, None)]

CASES = [
    Case("embedding", F.embedding, [ids, table], [(None, 0), (None, 1)], leaves=True),
    Case(
        "embedding of sharded ids",
        F.embedding,
        [ids, table],
        [(0, None), (1, None), (1, 0), (0, 1)],
        local=None,
        leaves=True,
    ),
    Case(
        "embedding padding",
        lambda i, w: F.embedding(i, w, padding_idx=3),
        [ids, table],
        [(None, 0), (None, 1)],
        leaves=True,
    ),
    Case("embedding padding -1", lambda i, w: F.embedding(i, w, -1), [ids, table], [(None, 0), (None, 1)], leaves=True),
    Case(
        "embedding by keyword",
        lambda i, w: F.embedding(input=i, weight=w),
        [ids, table],
        [(None, 0), (None, 1)],
        leaves=True,
    ),
    Case(
        "embedding torch",
        lambda i, w: torch.embedding(w, i),
        [ids, table],
        [(None, 0), (None, 1)],
        local=None,
        leaves=True,
    ),
    Case("embedding of one id", F.embedding, [torch.tensor(2), table], [(None, 0), (None, 1)], leaves=True),
    Case(
        "embedding by frequency",
        lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
        [ids, table],
        [(None, 0), (None, 1)],
        local=False,
        leaves=True,
    ),
    Case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        [x, normal(4), normal(4)],
        [*rows, (0, 0, None), (1, None, 0)],
        local=None,
    ),
    Case(
        "layer_norm rows",
        lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3),
        [x, normal(4), normal(4)],
        rows,
        leaves=True,
    ),
    Case(
        "layer_norm two dims",
        lambda x, w, b: F.layer_norm(x, [3, 4], weight=w, bias=b),
        [x, normal(3, 4), normal(3, 4)],
        [(0, None, None)],
    ),
    Case("layer_norm plain", lambda x: F.layer_norm(x, (4,)), [x], [(0,), (1,)]),
    Case("layer_norm torch", lambda x, w, b: torch.layer_norm(x, (4,), w, b), [x, normal(4), normal(4)], rows),
    Case(
        "layer_norm across",
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        [x, normal(4), normal(4)],
        [(2, None, None), (2, 0, 0), (None, 0, None)],
        local=False,
    ),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), [x, normal(4)], [(0, None), (1, None)], leaves=True),
    Case("rms_norm eps", lambda x, w: F.rms_norm(x, (4,), w, eps=1e-3), [x, normal(4)], [(0, None), (1, None)]),
    Case(
        "left-aligned mask",
        lambda x, m: (
            torch._nested_tensor_from_mask_left_aligned(x, m),
            torch._nested_tensor_from_mask_left_aligned(x, torch.tensor([[True, True, False], [True, False, False]])),
        ),
        [x, flags(2, 3)],
        [(0, None), (1, None), (2, None)],
    ),
    Case("rms_norm across", lambda x: F.rms_norm(x, (4,)), [x], [(2,)], local=False),
    Case(
        "normalize", lambda x: (F.normalize(x), F.normalize(x, dim=-1), F.normalize(x, 1.0, 0)), [x], [(0,), (1,), (2,)]
    ),
    Case("normalize zeros", lambda x: F.normalize(x, dim=-1), [x * flags(2, 3, 1)], [(0,), (1,), (2,)]),
]
