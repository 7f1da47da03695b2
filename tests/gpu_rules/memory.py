"""Bytes of tensors as the strict group sees them, of fake CUDA tensors too."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def on_host(x: Tensor) -> Tensor:
    """A CPU tensor of the same memory."""
    x = x.detach()
    if x.is_cuda and not is_fake(x):
        from tests.gpu_rules.build import extension

        return extension().alias(x)
    return x


def is_fake(x: Tensor) -> bool:
    """Whether it has no memory: torch's own groups then move nothing, too."""
    return isinstance(x, FakeTensor)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Changes where an entry of any of them does."""
    found = 0
    for x in tensors:
        if x.numel() and x.layout == torch.strided:
            plain = x.clone(memory_format=torch.contiguous_format).view(-1)
            found = zlib.adler32(plain.view(torch.uint8).numpy(), found)
    return found


def spoil(x: Tensor) -> None:
    """What is to be received is not there yet: whoever reads it before the wait meets NaN."""
    if x.is_contiguous() and x.numel():
        x.view(-1).view(torch.uint8).fill_(255)
