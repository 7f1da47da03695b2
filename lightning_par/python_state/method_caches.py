"""What `functools.lru_cache` keeps for methods of a class, of a library's too: by it a later run does less."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

_WITHOUT = ("torch.", "lightning.", "pytorch_lightning.", "builtins", "lightning_par.")
_Cached = type(functools.lru_cache(print))


def caches_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """The caches in the body of ``kind`` itself, and under which name; a function may be wrapped around one.

    None is looked for in classes of torch and Lightning. Nothing is remembered of ``kind``, which a run may have made.

    Example::

        class Positions(nn.Module):
            @functools.lru_cache
            def table(self, size): ...

        assert [name for name, _ in caches_of(Positions)] == ["table"]
    """
    if kind.__module__.startswith(_WITHOUT):
        return ()
    return tuple((name, cache) for name, value in vars(kind).items() for cache in _caches_in(value))


def _caches_in(value: Any) -> Iterator[Any]:
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    closed = function.__closure__ or () if isinstance(function, types.FunctionType) else ()
    inside = [cell.cell_contents for cell in closed if cell != types.CellType()]
    yield from (x for x in (function, *inside) if isinstance(x, _Cached))
