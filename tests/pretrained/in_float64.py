"""Models of `transformers` in float64, all of them: what they round to float32 is more than what is compared."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_par.sharded.patches.float_casts import all_in_float64


@contextmanager
def in_float64() -> Iterator[None]:
    """Within, neither ``x.float()`` nor ``x.to(torch.float32)``, as norms have it, rounds.

    Our own code casts by them, too, where it computes what a model deferred: not to be entered before that is done.
    """
    plain = Tensor.to

    @functools.wraps(plain)  # what is told of functions knows them by their names
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return plain(self, *args, **{name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()})

    with mock.patch.object(Tensor, "to", to), all_in_float64(True):
        yield
