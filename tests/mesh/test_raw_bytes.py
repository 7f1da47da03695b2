"""Tensors as bytes: also those of one element with a stride, as a column of a batch's last sample is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_par.mesh.digest import digest
from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.pipeline.program.constants import constants_of

COLUMN = torch.arange(12).reshape(3, 4)[:1, 1]


@pytest.mark.parametrize("x", [COLUMN, torch.tensor(1), torch.tensor([True]), torch.ones(1, 1)[:, :1]])
def test_a_strided_tensor_of_one_element_has_the_bytes_of_its_copy(x: Tensor) -> None:
    assert torch.equal(raw_bytes(x), raw_bytes(torch.tensor(x.tolist(), dtype=x.dtype)))
    assert raw_bytes(x).numel() == x.element_size()


def test_it_is_compared_as_any_other() -> None:
    assert COLUMN.stride() == (4,)
    same, other = torch.tensor([1]), torch.tensor([2])
    assert digest(COLUMN) == digest(same) != digest(other)
    assert constants_of(COLUMN, lambda x: False) == constants_of(same, lambda x: False)
    assert constants_of(COLUMN, lambda x: False) != constants_of(other, lambda x: False)


def test_no_elements_are_no_bytes() -> None:
    assert raw_bytes(torch.empty(0, 3)).numel() == 0
