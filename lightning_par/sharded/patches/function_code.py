"""A function of another package that does something else for a while, by whatever name code has it.

The object stays the one it is, so that default arguments, dicts, attributes and partial functions that hold it do the
same as the name that it was taken from.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from lightning_par.sharded.patches.replacement import Make, Use

_OURS = "_lightning_par_ours"
_NAME = "called"


class FunctionCode:
    """What ``function`` does from `install` to `undo`.

    Someone else may give it another code in between. Then that stays, and ours, where they have kept it, is turned off.

    Args:
        function: one of Python's.
        make: makes what it does of another function that does what it did, and of its `Use`. Beneath the caller is a
            frame of the function itself.

    Example::

        code = FunctionCode(textwrap.dedent, lambda plain, use: lambda text: plain(text) + ("!" if use.on else ""))
        code.install()
        assert textwrap.dedent(" a") == "a!"
        code.undo()
    """

    def __init__(self, function: types.FunctionType, make: Make) -> None:
        self._function, self._make = function, make
        self._use = Use()
        self._plain: types.CodeType | None = None
        self._ours: types.CodeType | None = None
        self._compiled: types.CodeType | None = None
        self._defaults: dict[str, Any] | None = None

    def install(self) -> None:
        """Give it our code; once before each `undo`."""
        function = self._function
        if function.__code__ is not self._ours:
            self._plain, self._defaults, self._use = function.__code__, function.__kwdefaults__, Use()
            if self._compiled is None or self._compiled.co_freevars != function.__code__.co_freevars:
                self._compiled = _around(function)  # once a process, which may make many runs
            self._ours = self._compiled
            ours = self._make(_same(function), self._use)
            function.__kwdefaults__ = {**(self._defaults or {}), _OURS: ours}  # which the plain code has no use of
            function.__code__ = self._ours
        self._use.on = True

    def undo(self) -> None:
        """Give it back its own code, or turn ours off where someone has given it another."""
        self._use.on = False
        if self._plain is not None and self._function.__code__ is self._ours:
            self._function.__code__ = self._plain
            self._function.__kwdefaults__ = self._defaults  # type: ignore[assignment]
            self._plain = self._ours = self._defaults = None


def _around(function: types.FunctionType) -> types.CodeType:
    """A code that calls what stands in the function's own defaults, with as many free variables as it has.

    It is compiled from words: Python crashes as it reads the locals of a frame whose free variables were merely
    declared, by ``code.replace(co_freevars=...)``.
    """
    free = function.__code__.co_freevars
    source = (
        f"def around({', '.join(free)}):\n"
        f" def {_NAME}(*args, {_OURS}, **kwargs):\n"
        f"  return {_OURS}(*args, **kwargs)\n"
        f"  {', '.join(free) or None}\n"
        f" return {_NAME}\n"
    )
    names: dict[str, Callable[..., types.FunctionType]] = {}
    exec(compile(source, __file__, "exec"), names)
    return names["around"](*free).__code__.replace(co_name=function.__code__.co_name)


def _same(function: types.FunctionType) -> types.FunctionType:
    """Another one that does what ``function`` does now."""
    same = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    same.__dict__.update(function.__dict__)
    same.__doc__, same.__module__, same.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return same
