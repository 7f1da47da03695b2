"""Calls of autograd functions of the user's in a trial run: no torch function tells of them, only of what they call."""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_par.private.graph import KEEPS_ARGUMENTS
from lightning_par.sharded.patches.function_code import FunctionCode
from lightning_par.sharded.patches.replacement import Use, installed

_OURS = ("torch.", "lightning_par.")


@dataclass(frozen=True, eq=False)
class Applied:
    """One call, of which a run makes what it is on tensors that are split: it is handed whole ones.

    Attributes:
        function: the class.
        args: of the call, as events have them.
        result: as events have it.
        first: the number of the first event that it makes itself.
        end: of the one behind the last.
        graph: whether autograd was on around it.
        place: file:line of the user's code.
    """

    function: Any
    args: tuple[Any, ...]
    result: Any
    first: int
    end: int
    graph: bool
    place: str

    @property
    def name(self) -> str:
        return self.function.__name__  # type: ignore[no-any-return]


class Hears(Protocol):
    """Hears of calls."""

    def applied(self, function: Any, call: Any, args: tuple[Any, ...]) -> Any:
        """The result of ``call``, by which ``function`` is applied to ``args``."""


def is_users(function: Any) -> bool:
    """Whether an autograd function is neither torch's nor this package's."""
    return function is not KEEPS_ARGUMENTS and not function.__module__.startswith(_OURS)


def functions_heard(hears: Hears) -> contextlib.AbstractContextManager[None]:
    """Inside, ``hears`` is told of calls of the user's autograd functions, but of those within another."""
    depth = 0

    def make(bare_apply: Any, use: Use) -> Any:
        @functools.wraps(bare_apply)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not use.on or depth or kwargs or not is_users(cls):
                return bare_apply(cls, *args, **kwargs)
            depth += 1
            try:
                return hears.applied(cls, functools.partial(bare_apply, cls), args)
            finally:
                depth -= 1

        return apply

    # by whatever name code has it: `twice = Twice.apply`
    return installed(FunctionCode(inspect.getattr_static(torch.autograd.Function, "apply").__func__, make))
