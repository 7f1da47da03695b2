"""Code that asks where torch's generators stand may draw from there and put them back, as `torch.random.fork_rng` does.

It has then drawn, and nobody sees that by looking at the generators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState


def patches() -> Iterable[Replacement]:
    """Of `torch.get_rng_state` and `torch.cuda.get_rng_state`, by which all of torch's and Lightning's contexts ask."""
    return Replacement(torch, "get_rng_state", _noted), Replacement(torch.cuda, "get_rng_state", _noted)


def _noted(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        RunState.current.streams.asked |= use.on
        return plain(*args, **kwargs)

    return get_rng_state
