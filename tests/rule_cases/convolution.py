"""Windows that slide along the sharded dim. On the tensor axis they gather; along the sequence, only borders move."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case
from tests.rule_cases.data import normal

C, L = 4, 13
line, image, volume = normal(2, C, L), normal(2, C, L, 12), normal(2, C, 3, L, 3)


def _conv(n: int, **options: Any) -> Any:
    return lambda x, w, b: getattr(F, f"conv{n}d")(x, w, b, **options)


def _weights(*kernel: int, inputs: int = C, outputs: int = 4) -> list[Tensor]:
    return [normal(outputs, inputs, *kernel), normal(outputs)]


def _cut(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Causal, as in Mamba and Hyena: both ends are padded, and what comes too late is cut off."""
    return x + F.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=C)[..., : x.shape[-1]]


def _padded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Causal: the start is padded."""
    return x * F.conv1d(F.pad(x, (w.shape[-1] - 1, 0)), w, b, groups=C)


def _shifted(x: Tensor) -> Tensor:
    """The token before, as in RWKV."""
    return x + F.pad(x, (1, -1))


CASES = [
    *[
        Case(f"conv1d along {name}", _conv(1, **options), [line, *_weights(kernel)], [(2, None, None)], local=False)
        for name, kernel, options in [
            ("valid", 3, {}),
            ("padded", 3, {"padding": 1}),
            ("padding more than needed", 3, {"padding": (4,)}),
            ("same", 4, {"padding": "same", "dilation": 2}),
            ("valid by name", 2, {"padding": "valid"}),
            ("stride", 3, {"padding": 1, "stride": 2}),
            ("stride larger than the kernel", 1, {"stride": 2}),
            ("dilation", 3, {"dilation": (3,), "padding": 3}),
            ("kernel larger than a shard", 11, {"padding": 5}),
        ]
    ],
    # Of one place each, as some transformers' feed-forwards: split as linear layers are.
    Case(
        "conv1d of one place",
        _conv(1),
        [line, *_weights(1)],
        [(None, 0, 0), (1, 1, None), (None, 1, None), (1, None, None)],
    ),
    Case("conv2d of one place", _conv(2, padding=0), [image, *_weights(1, 1)], [(None, 0, 0), (1, 1, None)]),
    Case("conv1d along, unbatched", _conv(1, padding=1), [line[0], *_weights(3)], [(1, None, None)], local=False),
    Case("conv1d along, too short", _conv(1), [line, *_weights(12)], [(2, None, None)], local=False),
    Case("conv1d causal by a cut", _cut, [line, *_weights(4, inputs=1)], [(2, None, None)], local=False),
    Case("conv1d causal by padding", _padded, [line, *_weights(4, inputs=1)], [(2, None, None)], local=False),
    Case(
        "conv2d along groups",
        _conv(2, padding=(2, 1), stride=(1, 2), groups=2),
        [image, *_weights(5, 3, inputs=2)],
        [(2, None, None), (3, None, None)],
        local=False,
    ),
    Case("conv2d along same", _conv(2, padding="same"), [image, *_weights(4, 3)], [(2, None, None)], local=False),
    Case("conv2d along odd", _conv(2, padding="same"), [image, *_weights(3, 4)], [(2, None, None)], local=False),
    Case("conv2d patches", _conv(2, stride=2), [image[:, :, 1:], *_weights(2, 2)], [(2, None, None)], local=False),
    Case("conv3d along", _conv(3, padding=1), [volume, *_weights(3, 3, 3)], [(3, None, None)], local=False),
    *[
        Case(f"{kind}_pool along", call, [image], [(2,)], local=False)
        for kind, call in {
            "max": lambda x: F.max_pool2d(x, 3, 2, (1, 0)),
            "dilated max": lambda x: F.max_pool2d(x, (3, 2), padding=1, stride=(1, 2), dilation=(2, 1)),
            "avg": lambda x: F.avg_pool2d(x, 2),
            "padded avg": lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=5),
            "ceiled": lambda x: (F.avg_pool2d(x, 2, ceil_mode=True), F.max_pool2d(x, 2, ceil_mode=True)),
            "uncounted": lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False),
            "indexed": lambda x: F.max_pool2d(x, 2, return_indices=True),
        }.items()
    ],
    Case("pool1d along", lambda x: F.max_pool1d(F.avg_pool1d(x, 3, 1, 1), 2), [line], [(2,)], local=False),
    *[
        Case(f"pad along {name}", call, [line], [(2,)], local=False)
        for name, call in {
            "constant": lambda x: F.pad(x, (2, 1, 1, 0), value=3.0),
            "cut": lambda x: F.pad(x, (-2, 1)),
            "reflect": lambda x: F.pad(x, (3, 4), mode="reflect"),
            "replicate": lambda x: F.pad(x, (2, 3), mode="replicate"),
            "circular": lambda x: F.pad(x, (3, 2), mode="circular"),
            "shifted": _shifted,
        }.items()
    ],
    Case("pad whole numbers along", lambda x: F.pad(x, (1, 2), value=-100), [torch.arange(L)], [(0,)], local=False),
]
