"""Where a generator stood before a function drew from it, and how it moves on without keeping what was drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Draw:
    """The state of a generator.

    Args:
        device: where the drawn tensor is.
        generator: the one that was given, None for the device's own.

    Example::

        draw = Draw(torch.device("cpu"), None)
        first = torch.rand(2)
        with draw.again():
            assert torch.equal(first, torch.rand(2))
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self.device, self.generator = device, generator
        self.state = self._get()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generator stands where it stood; afterwards, where it was."""
        before = self._get()
        self._set(self.state)
        try:
            yield
        finally:
            self._set(before)

    def _get(self) -> Tensor:
        if self.generator is not None:
            return self.generator.get_state()
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def _set(self, state: Tensor) -> None:
        if self.generator is not None:
            self.generator.set_state(state)
        elif self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def __repr__(self) -> str:
        return f"Draw({self.device}, {hashlib.blake2b(self.state.numpy().tobytes(), digest_size=16).hexdigest()})"


class ScratchDraws:
    """One piece of memory that is drawn into to move a generator on, as large as the largest tensor."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, x: Tensor) -> Tensor:
        """A tensor that lies in memory as ``x`` does, which may be on another device; its values are any."""
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        nbytes = (last + 1) * x.element_size() if x.numel() else 0
        if x.device != self._memory.device or nbytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give up what there is
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        storage: Any = self._memory.untyped_storage()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())
