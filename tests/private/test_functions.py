"""Functions of torch that its modules call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_par.private.functions import CHECK, assert_async, mask_is_left_aligned


def test_a_tensor_that_is_false_fails() -> None:
    assert_async(torch.tensor(True), "a message")
    with pytest.raises(RuntimeError, match="a message"):
        assert_async(torch.tensor(False), "a message")


def test_torch_has_the_function_that_traces_an_assert() -> None:
    check = getattr(torch, CHECK)
    check(torch.tensor(True), "a message")
    with pytest.raises(AssertionError, match="a message"):
        check(torch.tensor(False), "a message")


def test_an_encoder_asks_whether_its_mask_is_left_aligned() -> None:
    met: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(func)
            return func(*args, **(kwargs or {}))

    x, mask = torch.ones(2, 3, 4), torch.tensor([[True, False, False], [True, True, False]])
    assert mask_is_left_aligned(x, mask) and not mask_is_left_aligned(x, ~mask)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1).eval()
    with torch.no_grad(), Functions():
        encoder(x, src_key_padding_mask=~mask)
    assert mask_is_left_aligned in met
