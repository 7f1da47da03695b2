"""Objects that are no tensors, but hold some and say themselves what torch functions do with them.

torch asks a mode first, which then sees the object and not its tensors. So modes let the object take its tensors out,
and see the functions that it calls on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def run_by_wrapper(
    mode: TorchFunctionMode, func: Any, types: Sequence[type], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The result of ``func`` as an object says it that is among its arguments, seen by ``mode``.

    Returns:
        `NotImplemented` where there is none, or where it leaves the function to others.

    Example::

        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = run_by_wrapper(self, func, types, args, kwargs or {})
            return func(*args, **kwargs or {}) if result is NotImplemented else result
    """
    for kind in types:
        if not issubclass(kind, Tensor):
            TorchFunctionMode.__enter__(mode)  # torch takes a mode away while it runs; its class may do more here
            try:
                result = kind.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
            finally:
                TorchFunctionMode.__exit__(mode, None, None, None)
            if result is not NotImplemented:
                return result
    return NotImplemented


def is_wrapped(types: Sequence[type]) -> bool:
    """Whether an object that is no tensor says what a function does, of those that are asked: of ``types``."""
    return len(types) > 1 and not all(issubclass(kind, Tensor) for kind in types)
