"""Casts to float32 while two runs are compared in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_par.sharded.functions import name_of
from lightning_par.sharded.patches.float_casts import all_in_float64


class Names(TorchFunctionMode):
    """Which functions were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(name_of(func))
        return func(*args, **(kwargs or {}))


CASTS = {
    "float": lambda x: x.float(),
    "type": lambda x: x.type(torch.float32),
    "to": lambda x: x.to(torch.float32),
    "to, by name": lambda x: x.to(dtype=torch.float32),
    "to, with a device": lambda x: x.to("cpu", torch.float32),
}


@pytest.mark.parametrize("way", CASTS)
def test_what_is_cast_to_float32_stays_in_float64(way: str) -> None:
    x = torch.ones(2, dtype=torch.float64)
    with all_in_float64(), Names() as names:
        assert CASTS[way](x).dtype == torch.float64
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    if way != "float":
        assert way.split(",")[0] in names.seen
    assert CASTS[way](x).dtype == torch.float32
    with all_in_float64(False):
        assert CASTS[way](x).dtype == torch.float32
