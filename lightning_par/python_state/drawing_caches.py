"""Functions under `functools.lru_cache` that draw random numbers: a trial of a step that fills their caches spares the
step itself these draws, and what draws behind them draws other numbers than on one device."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from lightning_par.python_state import generators

_CACHED = type(functools.lru_cache(print))
_OWN_DRAWS = frozenset(("fork_rng", "Generator"))  # who names them may leave the global generators as they were


def tried(step: Callable[..., Any], *args: Any) -> Any:
    """What ``step`` returns, the outermost function of a trial: caches of those that called the trial itself, as of one
    that trains by ``trainer.fit``, are not filled by what the step draws."""
    return step(*args)


def drew_for_cache(draw: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``draw()`` returns, and the name of the function with a cache, called around it within the step, for which
    it draws from the global generators, if there is one.

    Example::

        @functools.cache
        def noise(size):
            return drew_for_cache(lambda: torch.rand(size))

        assert noise(3)[1] == "noise"
    """
    name = next(_cached_around(sys._getframe(1)), None)
    if name is None:
        return draw(), None
    before = generators.global_state()
    result = draw()
    return result, None if generators.same_global_state(before) else name


def _cached_around(frame: types.FrameType | None) -> Iterator[str]:
    """The names of the functions with a cache that are being called in the step."""
    named: set[str] = set()
    while frame is not None and frame.f_code is not tried.__code__:
        code = frame.f_code
        named.update(code.co_names)
        if frame.f_back is not None and _is_cached(frame, code) and named.isdisjoint(_OWN_DRAWS):
            yield code.co_name
        frame = frame.f_back


def _is_cached(frame: types.FrameType, code: types.CodeType) -> bool:
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    classes = () if first is None else (first if isinstance(first, type) else type(first)).__mro__
    held = (frame.f_globals.get(code.co_name), *(vars(kind).get(code.co_name) for kind in classes))
    return any(code is _code_of(x) for x in held)


def _code_of(value: Any) -> types.CodeType | None:
    """Of the function that ``value`` has a cache for."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return getattr(function.__wrapped__, "__code__", None) if isinstance(function, _CACHED) else None
