"""Views, slices, joins and writes into slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.rule_check import Case, Shard
from tests.rule_cases.data import flags, integers, normal

B, T, H, D = 2, 3, 4, 2
x = normal(B, T, 4)
every = [(0,), (1,), (2,)]
fused = normal(B, T, 3 * H * D)


def _written(x: Tensor, key: Any, value: Any) -> Tensor:
    x[key] = value
    return x


CASES = [
    # A sharded dim on its own, then split into heads and back.
    Case("view same", lambda x: x.view(B, T, 4), [x], every),
    Case("view sizes in a tuple", lambda x: x.view((B, T, 2, 2)), [x], [(0,), (1,)]),
    Case("view heads", lambda x: x.view(B, T, H, D), [normal(B, T, H * D)], [(0,), (1,), (Shard(2, D),)]),
    Case("view any", lambda x: x.view(B, T, H, D), [normal(B, T, H * D)], [(2,)], local=None),
    Case("view merges rows", lambda x: x.view(-1, 4), [x], [(2,), (0,)]),
    Case("view merges the inner", lambda x: x.view(-1, 4), [x], [(1,)], local=None),
    Case("view (B,T,3,H,d)", lambda x: x.view(B, T, 3, H, D), [fused], [(Shard(2, D, 3),), (0,), (1,)]),
    Case(
        "view (B,T,3,H,d) unbind", lambda x: x.view(B, T, 3, H, D).unbind(2), [fused], [(Shard(2, D, 3),)], local=None
    ),
    Case("view (B,T,H,3,d)", lambda x: x.view(B, T, H, 3, D), [fused], [(Shard(2, 3 * D),)]),
    Case("view (B,T,H,3d) chunk", lambda x: x.view(B, T, H, 3 * D).chunk(3, -1), [fused], [(Shard(2, 3 * D),)]),
    Case("view (T,B*H,d)", lambda x: x.view(T, B * H, D), [normal(T, B, H * D)], [(0,)]),
    Case(
        "view (T,B*H,d) of heads",
        lambda x: x.view(T, B * H, D).transpose(0, 1),
        [normal(T, B, H * D)],
        [(Shard(2, D),)],
    ),
    Case("view heads back", lambda x: x.transpose(1, 2).reshape(B, T, H * D), [normal(B, H, T, D)], [(0,), (1,), (2,)]),
    Case("reshape", lambda x: torch.reshape(x, (B * T, 4)), [x], [(0,), (2,)]),
    Case("reshape by keyword", lambda x: torch.reshape(x, shape=(B * T, 4)), [x], [(0,), (2,)]),
    Case("reshape to one dim", lambda x: x.reshape(-1), [x], [(0,)]),
    Case("reshape last to one dim", lambda x: x.reshape(-1), [x], [(1,), (2,)], local=None),
    Case("reshape with ones", lambda x: x.reshape(1, B, 1, T, 4, 1), [x], every),
    Case("reshape ones away", lambda x: x.reshape(T, 4), [normal(1, T, 1, 4)], [(1,), (3,)]),
    Case("reshape of size one", lambda x: x.reshape(T, 4), [normal(1, T, 1, 4)], [(0,), (2,)], local=None),
    Case("reshape across", lambda x: x.reshape(3, 4), [normal(4, 3)], [(0,), (1,)], local=None),
    Case("view dtype", lambda x: x.detach().view(torch.int64), [x], every, local=False),
    Case("flatten", lambda x: x.flatten(), [x], [(0,)]),
    Case("flatten dims", lambda x: torch.flatten(x, 1, -1), [x], [(0,), (1,)]),
    Case("flatten by keyword", lambda x: x.flatten(start_dim=1), [x], [(0,), (1,)]),
    Case("unflatten", lambda x: x.unflatten(-1, (H, D)), [normal(B, H * D)], [(0,), (Shard(1, D),)]),
    Case("unflatten -1", lambda x: torch.unflatten(x, 1, (-1, D)), [normal(B, H * D)], [(0,), (Shard(1, D),)]),
    Case("view_as", lambda x, y: x.view_as(y), [x, normal(B * T, 4)], [(0, None), (2, None), (0, 1)]),
    Case("reshape_as", lambda x, y: x.reshape_as(y), [x, normal(B * T, 4)], [(0, None), (2, None), (None, 0)]),
    *[
        Case(name, call, [x], every)
        for name, call in {
            "transpose": lambda x: x.transpose(0, -1),
            "transpose by keyword": lambda x: torch.transpose(x, dim0=1, dim1=2),
            "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
            "swapdims": lambda x: x.swapdims(1, 2),
            "permute": lambda x: x.permute(2, 0, 1),
            "permute tuple": lambda x: torch.permute(x, (1, -1, 0)),
            "permute by keyword": lambda x: x.permute(dims=(1, 0, 2)),
            "movedim": lambda x: x.movedim(0, -1),
            "movedim several": lambda x: torch.movedim(x, (0, 1), (2, 0)),
            "moveaxis": lambda x: torch.moveaxis(x, 2, 0),
            "mT": lambda x: x.mT,
            "mH": lambda x: x.mH,
            "T": lambda x: x.T,
            "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(1), torch.unsqueeze(x, -1), x.unsqueeze(-2)),
            "unsqueeze by keyword": lambda x: x.unsqueeze(dim=2),
            "squeeze": lambda x: x.squeeze(),
            "squeeze dim": lambda x: x.squeeze(1),
            "expand new": lambda x: x.expand(5, B, T, 4),
            "expand -1": lambda x: x.expand((5, -1, -1, -1)),
            "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
            "repeat_interleave size": lambda x: torch.repeat_interleave(x, 2, dim=-1, output_size=8),
            "repeat_interleave by keyword": lambda x: x.repeat_interleave(repeats=3, dim=0),
            "split": lambda x: x.split(2, dim=1),
            "split list": lambda x: torch.split(x, [1, 3], -1),
            "split by keyword": lambda x: torch.split(x, split_size_or_sections=3, dim=2),
            "split_with_sizes": lambda x: x.split_with_sizes([1, 0, 1], 0),
            "chunk": lambda x: x.chunk(2, dim=-1),
            "chunk uneven": lambda x: torch.chunk(x, 2, dim=1),
            "tensor_split": lambda x: torch.tensor_split(x, 3, dim=2),
            "narrow": lambda x: x.narrow(1, 1, 2),
            "narrow negative": lambda x: torch.narrow(x, 2, -3, 2),
            "getitem nothing": lambda x: (x[:], x[...], x[:, :], x[None], x[:, None, ..., None]),
            "getitem slices": lambda x: (x[:, 1:], x[..., 1:3], x[:1, :, -2:], x[1:, 0:2, ::2], x[:, ::2, 1::2]),
            "getitem none left": lambda x: x[:, 2:1],
            "detach": lambda x: x.detach().mT,
        }.items()
    ],
    Case("t", lambda x: (x.t(), x.T, x.H), [normal(4, 6)], [(0,), (1,)]),
    Case("t of one dim", lambda x: x.t(), [normal(4)], [(0,)]),
    Case("T of one dim", lambda x: x.T, [normal(4)], [(0,)]),
    Case(
        "squeeze ones",
        lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 2)), torch.squeeze(x, -2)),
        [normal(1, 4, 1, 3)],
        [(1,), (3,)],
    ),
    Case("squeeze the sharded", lambda x: x.squeeze(0), [normal(1, 4)], [(0,)], local=False),
    Case("squeeze another", lambda x: x.squeeze(0), [normal(2, 4)], [(0,), (1,)]),
    Case("expand ones", lambda x: x.expand(5, 4, 3), [normal(1, 4, 1)], [(1,)]),
    Case("expand the sharded", lambda x: x.expand(5, 4), [normal(1, 4)], [(0,)], local=False),
    Case("expand by keyword", lambda x: x.expand(size=(5, 4)), [normal(1, 4)], [(1,)]),
    Case("expand_as", lambda x, y: x.expand_as(y), [normal(1, 4), normal(3, 4)], [(1, None), (1, 1), (None, 0)]),
    Case("repeat_interleave all", lambda x: x.repeat_interleave(2), [x], every, local=False),
    Case(
        "repeat_interleave counts",
        lambda x, n: x.repeat_interleave(n, 1),
        [x, integers(3, 3) + 1],
        [(0, None)],
        local=None,
    ),
    Case("chunk fused", lambda x: x.chunk(3, dim=-1), [fused], [(0,), (2,), (Shard(2, D, 3),)]),
    Case("split fused", lambda x: x.split(H * D, dim=2), [fused], [(0,), (2,), (Shard(2, D, 3),)]),
    Case("tensor_split places", lambda x: x.tensor_split([1, 2], 2), [x], every, local=False),
    Case("unbind", lambda x: x.unbind(1), [x], [(0,), (2,)]),
    Case("unbind the sharded", lambda x: torch.unbind(x), [x], [(0,)], local=False),
    Case("iterate", lambda x: list(x), [x], [(1,), (2,)]),
    Case("select", lambda x: x.select(1, -1), [x], [(0,), (2,)]),
    Case("select the sharded", lambda x: torch.select(x, 1, 2), [x], [(1,)], local=False),
    Case("narrow by keyword", lambda x: torch.narrow(x, dim=2, start=1, length=2), [x], every),
    Case("getitem ints", lambda x: (x[:, 0], x[..., 1:2, :][:, -1], x[:, 1, None, :]), [x], [(0,), (2,)]),
    Case("getitem first", lambda x: (x[0], x[-1, 1:], x[1, ..., ::3]), [x], [(1,), (2,)]),
    Case("getitem int of the sharded", lambda x: x[:, 1], [x], [(1,)], local=False),
    Case("getitem list", lambda x: x[:, [0, 2]], [x], [(0,), (2,)]),
    Case("getitem list of flags and last", lambda x: x[[True, False] * (B // 2), :, [-2]], [x], [(1,)]),
    Case("getitem list of the sharded", lambda x: x[:, [0, 2]], [x], [(1,)], local=False),
    Case("getitem mask", lambda x, m: x[m], [x, flags(B, T)], [(2, None), (0, 0)], local=None),
    Case(
        "getitem of plain by sharded",
        lambda table, i: table[i],
        [normal(5, 3), integers(5, 4)],
        [(None, 0), (1, None)],
        local=None,
    ),
    Case("setitem number", lambda x: _written(x, (slice(None), 0), 3.0), [x], [(0,), (2,)]),
    Case(
        "setitem tensor",
        lambda x, y: _written(x, (slice(None), 1), y),
        [x, normal(B, 4)],
        [(0, None), (2, None), (0, 0), (2, 1)],
    ),
    Case(
        "setitem row",
        lambda x, y: _written(x, (..., slice(1, 3), slice(None)), y),
        [x, normal(4)],
        [(0, None), (2, None), (2, 0)],
    ),
    Case(
        "setitem of the sharded",
        lambda x, y: _written(x, (slice(None), slice(1, None)), y),
        [x, normal(B, 2, 4)],
        [(1, None), (1, 1)],
        local=False,
    ),
    Case(
        "setitem mask", lambda x, m: _written(x, m, 0.0), [x, flags(B, T)], [(0, None), (2, None), (1, 1)], local=None
    ),
    Case(
        "setitem into plain", lambda x, y: _written(x, (slice(None), 1), y), [x, normal(B, 4)], [(None, 1)], local=False
    ),
    Case("setitem other dims", lambda x, y: _written(x, (slice(None), 1), y), [x, normal(B, 4)], [(0, 1)], local=False),
    Case(
        "cat",
        lambda x, y: torch.cat([x, y], dim=1),
        [x, normal(B, 5, 4)],
        [(0, 0), (1, 1), (2, 2), (0, None), (None, 2)],
    ),
    Case("cat along", lambda x, y: torch.cat((x, y, x), -1), [x, normal(B, T, 3)], [(2, 2)]),
    Case(
        "cat plain along", lambda x, y: torch.cat((x, y), -1), [x, normal(B, T, 3)], [(2, None), (None, 2)], local=False
    ),
    Case("cat of different dims", lambda x, y: torch.cat((x, y)), [x, x + 1], [(0, 1), (1, 2)], local=False),
    Case(
        "cat of size one",
        lambda x, y: torch.cat((x, y), 1),
        [normal(1, 3), normal(1, 2)],
        [(0, None), (0, 0)],
        local=None,
    ),
    Case("cat with an empty", lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x, x], 1), [x], every),
    Case("cat by keyword", lambda x, y: torch.cat(tensors=[x, y], dim=2), [x, x + 1], [(0, 0), (1, None)], local=None),
    Case("concat", lambda x: torch.concat([x, x]), [x], every),
    Case("concatenate", lambda x: torch.concatenate([x, x], 1), [x], every),
    Case("stack", lambda x, y: torch.stack([x, y], dim=1), [x, x + 1], [(0, 0), (1, 1), (2, 2), (1, None), (None, 2)]),
    Case("stack last", lambda x, y: torch.stack((x, y), -1), [x, x + 1], [(0, 0), (2, 2)]),
    Case(
        "metadata",
        lambda x: (
            x.dim(),
            x.size(),
            x.size(1),
            x.numel(),
            x.nelement(),
            x.ndimension(),
            len(x),
            x.ndim,
            x.is_floating_point(),
            x.is_complex(),
            x.is_signed(),
            x.element_size(),
            x.get_device(),
            torch.is_tensor(x),
            torch.result_type(x, 1),
            x.is_inference(),
            x.is_conj(),
            x.is_neg(),
            x.shape,
            x.dtype,
            x.device,
            x.is_same_size(x),
            x.stride(),
            x.storage_offset(),
            x.is_contiguous(),
            hash(x) == hash(x),
            torch.is_conj(x),
            x.is_shared(),
            x.is_pinned(),
            x._is_view(),
            {*dir(x)} >= {"shape", "dtype"},
        ),
        [x],
        every,
    ),
    Case("is_contiguous", lambda x: x.mT.contiguous().is_contiguous(), [x], every),
]
