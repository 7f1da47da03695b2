"""A mask is looked at once a step, however many layers get it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_par.sequence.deep_masks import DeepMasks

DEEP = torch.tensor([[[[0.0, 0.0], [-1e9, -1e9]]]])


class _Reads(TorchDispatchMode):
    """Counts how often a number is read of a tensor, for which a GPU's host waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", [DEEP, DEEP / 1e7])
def test_all_layers_share_one_look(mask: torch.Tensor) -> None:
    masks, reads = DeepMasks(), _Reads()
    with reads:
        answers = {masks.has(mask[:, :, :, :2]) for _ in range(12)}
    assert answers == {mask is DEEP} and reads.count == 1


def test_who_writes_to_a_mask_is_noticed() -> None:
    masks, mask = DeepMasks(), torch.zeros(1, 1, 2, 2)
    assert not masks.has(mask)
    mask[:, :, 1] = -1e9
    assert masks.has(mask)


def test_in_inference_each_is_looked_at() -> None:
    masks = DeepMasks()
    with torch.inference_mode():
        mask = torch.zeros(1, 1, 2, 2)
        assert not masks.has(mask)
        mask.fill_(-1e9)
        assert masks.has(mask)


def test_booleans_and_nothing_hide_no_digits() -> None:
    masks = DeepMasks()
    assert not masks.has(torch.zeros(1, 1, 2, 2, dtype=torch.bool)) and not masks.has(torch.zeros(1, 1, 0, 2))


def test_a_step_ends_with_its_masks() -> None:
    masks = DeepMasks()
    masks.has(DEEP)
    masks.forget()
    assert not masks._known
