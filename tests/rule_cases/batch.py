"""Functions that treat each sample by itself, with the samples or other rows sharded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case
from tests.rule_cases.data import integers, normal, unit

N, C, L, T, H = 6, 4, 8, 5, 3
line, image, volume = normal(N, C, L), normal(N, C, L, L), normal(N, C, L, 4, 4)
inputs = {1: line, 2: image, 3: volume}
rows, rows_and_channels = [(0,)], [(0,), (1,)]


def _weighted(name: str, **options: Any) -> Any:
    return lambda x, w, b: getattr(F, name)(x, w, b, **options)


def _layer(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(*shape) for shape in shapes]


def _transformed(name: str, x: Tensor, **options: Any) -> Tensor:
    return torch.view_as_real(getattr(torch.fft, name)(x, **options) * (1 + 0j))


CASES = [
    *[
        Case(
            f"conv{n}d",
            _weighted(f"conv{n}d", padding=1),
            [inputs[n], normal(6, C, *[3] * n), normal(6)],
            [(0, None, None)],
        )
        for n in (1, 2, 3)
    ],
    *[
        Case(
            f"conv_transpose{n}d",
            _weighted(f"conv_transpose{n}d"),
            [inputs[n], normal(C, 2, *[2] * n), normal(2)],
            [(0, None, None)],
        )
        for n in (1, 2, 3)
    ],
    # Each channel by itself: split as the layers around it are.
    *[
        Case(
            f"conv{n}d by channel",
            lambda x, w, b, n=n: getattr(F, f"conv{n}d")(x, w, b, padding=1, groups=C),
            [x, normal(C, 1, *[3] * n), normal(C)],
            [(1, 0, 0), (1, None, None), (1, 0, None)],
        )
        for n, x in [(1, image[..., 0]), (2, image)]
    ],
    Case(
        "conv2d by group",
        lambda x, w: F.conv2d(x, w, groups=2),
        [image, normal(C, C // 2, 3, 3)],
        [(1, 0)],
        local=False,
    ),
    Case("conv2d unbatched", lambda x, w: F.conv2d(x, w), [image[0], normal(2, C, 3, 3)], [(0, None)], local=False),
    Case("conv2d by keyword", lambda x, w: F.conv2d(input=x, weight=w), [image, normal(2, C, 3, 3)], [(0, None)]),
    Case("conv2d split weight", F.conv2d, [image, normal(N, C, 3, 3)], [(None, 0), (0, 0), (1, None)], local=False),
    *[
        Case(f"{name}{n}d", partial(getattr(F, f"{name}{n}d"), **options), [inputs[n]], rows_and_channels)
        for n in (1, 2, 3)
        for name, options in {
            "max_pool": {"kernel_size": 2},
            "avg_pool": {"kernel_size": 2},
            "lp_pool": {"norm_type": 2, "kernel_size": 2},
            "adaptive_avg_pool": {"output_size": 2},
            "adaptive_max_pool": {"output_size": 2},
        }.items()
    ],
    *[
        Case(f"{name}{n}d indices", partial(call, n), [inputs[n]], rows_and_channels)
        for n in (1, 2, 3)
        for name, call in {
            "max_unpool": lambda n, x: getattr(F, f"max_unpool{n}d")(
                *getattr(F, f"max_pool{n}d")(x, 2, return_indices=True), 2
            ),
            "adaptive_max_pool": lambda n, x: getattr(F, f"adaptive_max_pool{n}d")(x, 2, return_indices=True),
        }.items()
    ],
    Case(
        "interpolate",
        lambda x: (
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(5, 5), mode="bilinear"),
            F.upsample(x, scale_factor=2),
        ),
        [image],
        rows_and_channels,
    ),
    Case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), [line, *_layer((C,), (C,))], [(0, None, None)]),
    Case("group_norm channels", lambda x: F.group_norm(x, 2), [line], [(1,), (2,)], local=False),
    Case("instance_norm", lambda x, w: F.instance_norm(x, weight=w), [line, normal(C)], [(0, None)], local=None),
    Case(
        "instance_norm stored",
        lambda x: F.instance_norm(x, torch.zeros(C).double(), torch.ones(C).double()),
        [line],
        [(0,)],
        local=False,
    ),
    Case(
        "batch_norm of evaluation",
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b),
        [line, normal(C), unit(C), normal(C), normal(C)],
        [(0, None, None, None, None), (2, None, None, None, None)],
    ),
    Case("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), [line], [(0,), (1,)], local=False),
    Case(
        "batch_norm torch",
        lambda x, m, v: torch.batch_norm(x, None, None, m.detach(), v.detach(), False, 0.1, 1e-5, False),
        [line, normal(C), unit(C)],
        [(0, None, None)],
        local=False,
    ),
    Case("local_response_norm", lambda x: F.local_response_norm(x, 2), [image], rows),
    Case("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), [image], rows),
    Case("pixel_shuffle", lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), [image], rows),
    Case("fold", lambda x: F.fold(F.unfold(x, 2), (L, L), 2), [image], rows),
    Case("unfold", lambda x: (x.unfold(2, 3, 2), x.unfold(-1, 2, 1)), [image], rows_and_channels),
    Case("unfold across", lambda x: x.unfold(0, 3, 2), [image], rows, local=False),
    Case(
        "pad",
        lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, 1, 2, 0, 0, 0, 0, 0)), F.pad(x, (1, 1, 1, 1), mode="reflect")),
        [image],
        rows_and_channels,
    ),
    Case("pad across", lambda x: F.pad(x, (1, 2)), [line], [(2,)], local=False),
    Case(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        [image, normal(N, 3, 3, 2)],
        [(0, None), (0, 0), (None, 0)],
    ),
    Case("affine_grid", lambda t: F.affine_grid(t, [N, 1, 3, 3], align_corners=False), [normal(N, 2, 3)], rows),
    Case(
        "cosine_similarity",
        lambda a, b: (F.cosine_similarity(a, b), torch.cosine_similarity(a, b, dim=-1)),
        [line, normal(N, C, L)],
        [(0, 0), (0, None)],
    ),
    Case(
        "cosine_similarity broadcast",
        lambda a, b: F.cosine_similarity(a.unsqueeze(1), b, dim=-1),
        [normal(N, L), normal(T, L)],
        [(0, None), (None, 0)],
    ),
    Case("cosine_similarity across", F.cosine_similarity, [line, normal(N, C, L)], [(1, 1)], local=False),
    Case("pairwise_distance", F.pairwise_distance, [normal(N, L), normal(N, L)], [(0, 0), (None, 0)]),
    Case("cdist", torch.cdist, [line, normal(N, 3, L)], [(0, 0), (0, None)]),
    Case("cdist across", torch.cdist, [normal(N, L), normal(N, L)], [(0, 0)], local=False),
    *[
        Case(f"{name} {label}", partial(call, name), [image], rows_and_channels)
        for name in ("tril", "triu")
        for label, call in {
            "method": lambda name, x: getattr(x, name)(),
            "function": lambda name, x: getattr(torch, name)(x, diagonal=1),
        }.items()
    ],
    Case("complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), [normal(N, C, 2)], rows_and_channels),
    Case("real", lambda x: (torch.view_as_complex(x).real, torch.view_as_complex(x).imag), [normal(N, C, 2)], rows),
    Case("one_hot", lambda i: F.one_hot(i, 4), [integers(4, N, T)], rows_and_channels),
    Case("one_hot of the largest", F.one_hot, [integers(4, N, T)], rows, local=False),
    Case("bucketize", lambda x, b: torch.bucketize(x, b.sort().values), [line, normal(T)], [(0, None)], grad=False),
    Case(
        "searchsorted",
        lambda x, v: torch.searchsorted(x.sort().values, v, right=True),
        [normal(N, T), normal(N, 3)],
        [(0, 0), (0, None), (None, 0)],
        grad=False,
    ),
    Case(
        "searchsorted in one",
        lambda x, v: torch.searchsorted(x.sort().values, v),
        [normal(T), normal(N, 3)],
        [(None, 0)],
        grad=False,
    ),
    Case(
        "embedding_bag",
        lambda i, w, s: (F.embedding_bag(i, w), F.embedding_bag(i, w, mode="sum", per_sample_weights=s)),
        [integers(7, N, T), normal(7, C), normal(N, T)],
        [(0, None, 0), (0, None, None)],
        local=None,
    ),
    *[
        Case(f"fft of {name}", partial(_transformed, name), [image], rows)
        for name in (
            "fft",
            "ifft",
            "rfft",
            "irfft",
            "hfft",
            "ihfft",
            "fft2",
            "ifft2",
            "rfft2",
            "irfft2",
            "hfft2",
            "ihfft2",
        )
    ],
    *[
        Case(
            f"fft of {name}",
            partial(_transformed, name, dim=(1, -1)),
            [image],
            rows,
        )
        for name in ("fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn")
    ],
    Case(
        "fft sizes",
        lambda x: torch.fft.fftn(x, (3, 3)).abs() + torch.fft.fft(x, n=3)[..., :3, :].abs(),
        [normal(N, 3, 3)],
        rows,
    ),
    Case("fft across", lambda x: torch.fft.fftn(x).abs(), [line], rows, local=False),
]
CASES = [replace(case, empty=False) for case in CASES]
