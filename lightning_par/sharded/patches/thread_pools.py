"""``ThreadPoolExecutor.submit``: modes are of one thread, and code that builds a module may let others read weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_par.sharded.patches.replacement import Replacement, Use


def patch(joined: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Replacement:
    """What pools are given runs as ``joined`` of it.

    Args:
        joined: of a function, that which runs it in a worker thread.
    """

    def make(plain: Any, use: Use) -> Any:
        @functools.wraps(plain)
        def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return plain(self, joined(fn) if use.on else fn, *args, **kwargs)

        return submit

    return Replacement(ThreadPoolExecutor, "submit", make)
