"""Arguments of torch's functions of lists, as `torch._foreach_mul_`, for some entries of these."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any


def kept_entries(keep: Sequence[bool], args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with those entries of each list or tuple as long as ``keep`` that it says to keep; all else as is.

    Example::

        assert kept_entries([True, False], ([a, b], [1, 2], 0.5), {}) == ([[a], [1], 0.5], {})
    """

    def kept(value: Any) -> Any:
        many = isinstance(value, (list, tuple)) and len(value) == len(keep)
        return [*compress(value, keep)] if many else value

    return [*map(kept, args)], {key: kept(value) for key, value in kwargs.items()}
