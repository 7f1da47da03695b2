"""What a step's backward runs again, as the module itself says by `torch.utils.checkpoint`.

The trial runs it once, as if nothing were said, and notes which functions are in it; what a plan makes of it, it makes
of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from lightning_par.private.graph import checkpoint_generator, checkpointing_as


class Region(NamedTuple):
    """What backward runs again, as one.

    Attributes:
        context_fn: gives what `torch.utils.checkpoint.checkpoint` enters around the first run and around the second, as
            for selective checkpointing.
        stops: whether the second run ends with the last tensor that backward needs; the reentrant kind's does not.
        call: of a module, by its number, in which it begins.
        reentrant: whether its second run is a forward and a backward of their own.
    """

    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn
    stops: bool = True
    call: int = 0
    reentrant: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of it is run again, and nothing chosen."""
        return self.context_fn is noop_context_fn


def filled(found: Sequence[int | None], outside: int) -> tuple[int, ...]:
    """By events, where each is: one of which that is not known, None, is between two of one, or ``outside``."""
    known = [*found]
    for i, place in enumerate(known):
        if place is None:
            before, behind = known[i - 1] if i else outside, next((x for x in found[i + 1 :] if x is not None), outside)
            known[i] = before if before == behind else outside
    return tuple(outside if place is None else place for place in known)


class Hears(Protocol):
    """Hears of regions."""

    def begin_region(self, region: Region) -> None:
        """What follows is run again in backward."""

    def end_region(self) -> None:
        """Up to here."""


@contextmanager
def regions_heard(hears: Hears) -> Iterator[None]:
    """Inside, what is checkpointed runs once, and ``hears`` is told of it."""
    module, name = checkpoint_generator()
    named = inspect.signature(getattr(module, name))

    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        told = named.bind(fn, *args, **kwargs).arguments
        with _region(hears, Region(told.get("context_fn", noop_context_fn), told.get("early_stop", True))):
            yield

    with checkpointing_as(generator, partial(_run_once, hears)):
        yield


def _run_once(hears: Hears, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        with torch.no_grad():  # as torch's own function has no graph then
            return run(*args)
    with _region(hears, Region(stops=False, reentrant=True)):
        return run(*args)


@contextmanager
def _region(hears: Hears, region: Region) -> Iterator[None]:
    """What is done inside is ``region``, unless no backward comes there."""
    if not torch.is_grad_enabled():
        yield
        return
    hears.begin_region(region)
    try:
        yield
    finally:
        hears.end_region()
