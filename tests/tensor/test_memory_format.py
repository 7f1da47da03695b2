"""Where channels of a convolution lie in memory under a tensor axis: as on one device, for views and draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import TensorParallelStrategy
from lightning_par.sharded.rules.memory_format import memory_format_of
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import CLASSES, Net, check, loader, trained


class Convolves(Net):
    """Convolutions of one place each, whose result is seen by its strides, and noise that fills memory like it."""

    def __init__(self, hidden: int = 6, last: bool = False, dims: int = 2) -> None:
        super().__init__(lr=0.1)
        kinds: list[Any] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
        self.net = nn.Sequential(kinds[dims - 1](6, hidden, 1), nn.GELU(), kinds[dims - 1](hidden, 8, 1))
        self.head, self.dims = nn.Linear(8 * 2**dims, CLASSES), dims
        if last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(2**self.dims, dtype=x.dtype).view(*[2] * self.dims)
        x = self.net(self.given(x.view(*x.shape, *[1] * self.dims) * (1 + steps)))
        return self.head(self.flat(x + 0.1 * torch.randn_like(x)))

    def given(self, x: Tensor) -> Tensor:
        return x

    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


class Last(Convolves):
    """Of an input whose channels lie last."""

    def given(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).view(len(x), -1)


class LastByWeight(Last):
    """Of weights whose channels lie last, of which a rank has one."""

    def __init__(self) -> None:
        super().__init__(hidden=2, last=True)

    def given(self, x: Tensor) -> Tensor:
        return x


KINDS: dict[str, Callable[[], Net]] = {
    "2d": Convolves,
    "one channel": partial(Convolves, hidden=2),
    "1d": partial(Convolves, dims=1),
    "3d": partial(Convolves, dims=3),
    "last": Last,
    "last by weight": LastByWeight,
}


def _fit(kind: str) -> Any:
    return trained(KINDS[kind](), loader(12), partial(TensorParallelStrategy, draws="one_device"))


@slow(but=["2d", "last by weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_channels_lie_as_on_one_device(kind: str, pool: Pool) -> None:
    check(pool, _fit, kind)


SHAPES = [(2, 3, 4, 5), (2, 3, 1, 1), (1, 3, 4, 4), (2, 1, 4, 4), (3, 1, 1, 1)]


@pytest.mark.parametrize("weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("lies", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_format_is_that_of_torchs_own_convolution(
    shape: tuple[int, ...], lies: torch.memory_format, weight: torch.memory_format
) -> None:
    x = torch.ones(shape).to(memory_format=lies)
    w = torch.ones(4, shape[1], 1, 1).to(memory_format=weight)
    out = F.conv2d(x, w)
    assert out.stride() == torch.empty(out.shape, memory_format=memory_format_of(x, w)).stride()
