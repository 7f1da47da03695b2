"""What each rank makes for itself in a step need not be sent: it may stand for what another rank made."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch
from torch import nn

from lightning_par.pipeline.effects.local_objects import place_of_made, stand_in_for


class Backend:
    def __init__(self, *kept: Any) -> None:
        self.torch, self.lock, self.kept = torch, threading.Lock(), kept


def place(own: Any, value: Any, key: Any = "torch") -> str | None:
    return stand_in_for(value, "backends", key, {"backends": {place_of_made("backends", "torch"): own}})


def test_an_entry_of_a_cache_stands_for_its_like_at_any_key() -> None:
    assert place(Backend(1, "a"), Backend(1, "a")) == place_of_made("backends", "torch")
    assert place(Backend(), Backend(), nn.Parameter) == place_of_made("backends", "torch")
    assert place(re.compile("a"), re.compile("a")) is not None
    assert stand_in_for(Backend(), "others", "torch", {"backends": {"a": Backend()}}) is None


def test_what_goes_by_the_model_has_no_stand_in() -> None:
    assert place(Backend(1.0), Backend(2.0)) is None
    assert place(Backend("a"), Backend("b")) is None
    assert place(Backend(torch.ones(1)), Backend(torch.ones(1))) is None
    assert place(Backend(nn.Linear(1, 1)), Backend(nn.Linear(1, 1))) is None
    assert place(lambda: 1.0, threading.Lock()) is None

    def keeping(x: float) -> Any:
        return lambda: x

    assert place(keeping(1.0), keeping(2.0)) is None
    assert place(keeping(1.0), keeping(1.0)) is not None
    assert place(lambda x: x, lambda x: -x) is None
    assert place([].append, [].clear) is None
    assert place(Backend(int), Backend(float)) is None
