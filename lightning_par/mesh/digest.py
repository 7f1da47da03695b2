"""A tensor in a few numbers, computed where it is, so that ranks compare those: its bytes' hash, and its outline."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_par.mesh.raw_bytes import raw_bytes

_CHUNK = 1 << 22  # bytes mixed at a time: small beside any tensor that matters
_PROBES = 16  # numbers of an outline
_STEP, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """The hash of ``x``, plain and dense: an int64 of no dims, on its device.

    Equal bytes give equal hashes on every device; a difference anywhere, be it of order alone, gives others.

    Example::

        x = torch.randn(1000)
        assert digest(x) == digest(x.clone()) and digest(x) != digest(x.flip(0))
    """
    flat = raw_bytes(x.detach().contiguous())
    total = torch.full((), flat.numel(), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), _CHUNK):
        total += _mixed(flat[start : start + _CHUNK], start)
    return total


def _mixed(chunk: Tensor, start: int) -> Tensor:
    """Each word is mixed with its place (by splitmix64's finalizer), so that the sum knows the order."""
    words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)  # always a copy, hence aligned
    words += torch.arange(start, start + words.numel(), device=chunk.device) * _STEP
    words ^= words >> 30
    words *= _FIRST
    words ^= words >> 27
    words *= _SECOND
    return (words ^ (words >> 31)).sum()


@torch.no_grad()
def outline(x: Tensor) -> Tensor:
    """Sums of the entries of ``x`` under random signs: float64 of shape (16,), on its device.

    How far two tensors of one shape are apart, can be told from their outlines: the root mean square of the difference
    of these is about the Euclidean norm of the difference of those (Alon, Matias and Szegedy, 1996).

    Example::

        x = torch.randn(1000)
        y = x + 1e-6
        assert 0.3 < (outline(x) - outline(y)).square().mean().sqrt() / (x - y).double().norm() < 3
    """
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    total = torch.zeros(_PROBES, dtype=torch.float64, device=x.device)
    for start in range(0, flat.numel(), _CHUNK // _PROBES):
        chunk = flat[start : start + _CHUNK // _PROBES].double()
        generator = torch.Generator(x.device).manual_seed(start)
        shape = (_PROBES, chunk.numel())
        signs = torch.randint(2, shape, generator=generator, dtype=torch.float64, device=x.device)
        total += (2 * signs - 1) @ chunk
    return total
