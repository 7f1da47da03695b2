"""Random numbers of a stage: torch's keyed by (seed, step, microbatch, event), whatever the other stages drew.

Under ``draws="one_device"`` they are that device's: the generators stand before each event where they stand there, as
the step's dry run has found out, and what an event draws for a microbatch is its part of what it draws for the batch.

Those of numpy and `random` are one device's, since the step draws them alike in all its runs. A module that is called
as a whole runs on one rank alone, so it must not draw from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lightning_par.pipeline.program import event_draws
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.fake_tensors import active_fakes
from lightning_par.python_state.global_generators import NUMPY, PYTHON, are_same
from lightning_par.sharded.functions import DRAWS
from lightning_par.sharded.random_streams import Mixed, mix
from lightning_par.sharded.run_state import RunState


class GlobalDrawError(UnitError):
    """A module that is called as a whole draws from a global generator of numpy or ``random``.

    Args:
        units: the module, or those of which it is one.
    """

    def __init__(self, *units: str) -> None:
        super().__init__(
            f"{' or '.join(map(repr, units))} draws from the global generator of numpy or of `random`. It runs on one "
            "rank of the pipeline, and the others could not draw on where it ended. Draw from torch's generators "
            "there, or draw in the step and give the module the number.",
            units[0],
        )


def standing() -> tuple[Any, Any]:
    """Where the global generators of numpy and ``random`` stand."""
    return NUMPY.get(), PYTHON.get()


def stand_at(state: tuple[Any, Any]) -> None:
    """Put the global generators of numpy and ``random`` there."""
    NUMPY.set(state[0])
    PYTHON.set(state[1])


def is_standing(state: tuple[Any, Any], now: tuple[Any, Any] | None = None) -> bool:
    """Whether the global generators of numpy and ``random`` stand there ``now``, if that is known."""
    return are_same(state, now or standing())


class StageDraws(Protocol):
    """What a run of a stage draws."""

    def of(self, event: int, what: Any, kwargs: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Around an event: the torch function or module ``what``, which is given ``kwargs``."""

    def at(self, event: int) -> None:
        """A region begins with ``event`` that backward is to run again as one, from where generators stand now."""

    def several(self, seeds: bool, looks: bool) -> contextlib.AbstractContextManager[Draws | None]:
        """Around modules that run one after the other, all of which may draw, or, unless it ``seeds``, none is known
        to, and ``looks`` whether any does; gives what is quicker than `of`."""


class KeyedDraws:
    """Draws from streams of their own.

    Args:
        key: what they are keyed by, up to the event.
    """

    def __init__(self, key: Sequence[int]) -> None:
        self.key = tuple(key)

    def of(self, event: int, what: Any, kwargs: Any = None) -> contextlib.AbstractContextManager[Any]:
        return drawing((*self.key, event), what)

    def at(self, event: int) -> None:
        pass

    def several(self, seeds: bool, looks: bool) -> contextlib.AbstractContextManager[Draws | None]:
        return Draws(self.key, seeds, looks)


def drawing(key: Sequence[int], what: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, draws of torch's generators come from a stream of their own; afterwards these stand where they stood.

    Args:
        key: what the stream is keyed by.
        what: the torch function or module that is about to run; one that draws nothing costs nothing.
    """
    draws = what.training if isinstance(what, nn.Module) else getattr(what, "__name__", "") in DRAWS
    return Keyed(key) if draws else contextlib.nullcontext()


class Draws:
    """Inside, several modules draw one after the other, each from a stream of its own, as by `drawing`.

    Args:
        key: what the streams are keyed by, up to the event.
        seeds: whether there are such streams; to seed them for modules that draw nothing takes longer than they may.
        looks: whether to see, where there are none, if anything draws.

    Attributes:
        drew: whether something was drawn where there are no streams.
    """

    drew = False

    def __init__(self, key: Sequence[int], seeds: bool = True, looks: bool = True) -> None:
        self.seed, self.looks = Mixed(*key) if seeds else None, looks or seeds
        # the first costs nothing
        self.cuda = seeds and torch.cuda.is_initialized() and torch.cuda.is_available()

    def __enter__(self) -> Draws:
        self.streams = RunState.current.streams
        self.before = event_draws.standing() if self.looks else None
        self.event, self.streams.asked = self.streams.event, False
        return self

    def stand_at(self, event: int) -> None:
        """The module that is the step's ``event`` is about to run."""
        self.streams.event = event * 1000
        if self.seed is None:
            return
        seed = self.seed(event)
        torch.default_generator.manual_seed(seed)
        if self.cuda:
            torch.cuda.manual_seed(seed)

    def __exit__(self, *exception: object) -> None:
        self.streams.event = self.event
        if self.before is None:
            return
        if self.seed is None and active_fakes() is None:  # these draw nothing
            # who asks may draw, and put the generators back
            self.drew = self.streams.asked or not event_draws.are_equal(event_draws.standing(), self.before)
        if self.drew or self.seed is not None:
            event_draws.stand_at(self.before)


class Keyed(contextlib.AbstractContextManager[None]):
    """As `drawing`, whatever runs inside."""

    def __init__(self, key: Sequence[int]) -> None:
        self._key = key

    def __enter__(self) -> None:
        streams = RunState.current.streams
        self._before, self._streams = event_draws.standing(), streams
        # sharded draws, too, go by the event, not by what ran here before
        self._event, streams.event = streams.event, self._key[-1] * 1000
        seed = mix(*self._key)
        torch.default_generator.manual_seed(seed)
        if self._before[1] is not None:
            torch.cuda.manual_seed(seed)

    def __exit__(self, *exception: object) -> None:
        self._streams.event = self._event
        event_draws.stand_at(self._before)
