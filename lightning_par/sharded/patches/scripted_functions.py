"""A function of ``torch.jit.script`` or ``torch.jit.trace`` is one function to a step over stages.

Its own operations run in torch's interpreter, where no function of torch is met. What it returned would be a value that
nobody made: other stages could not follow it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of calls of `torch.jit.ScriptFunction`."""
    return Replacement(torch.jit.ScriptFunction, "__call__", _as_event)


def _as_event(plain: Any, use: Use) -> Any:
    from lightning_par.pipeline.run.located import Run

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = Run.current
        if not use.on or run is None or run.depth:
            return plain.__get__(self)(*args, **kwargs)
        return run.__torch_function__(self, (), args, kwargs)

    return call
