"""What listens to a trial run of a step beside its recording, so that one run does for several parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class Listener(Protocol):
    """Hears what one trial run does."""

    def begin(self, copy: nn.Module) -> None:
        """``copy`` is about to run the step."""

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, of_model: bool, unsized: bool = False) -> None:
        """A torch function was called.

        Args:
            func: the function, or what stands for the call of a metric's method.
            args: its arguments.
            kwargs: its arguments by name.
            result: what it returned; None where it reads a value of the model.
            of_model: whether it takes a value of the model.
            unsized: whether the shape of its result depends on such values.
        """

    def note_within(self, args: Any, kwargs: Any, result: Any, of_model: bool) -> None:
        """A torch function was called within one that is written out, of which `note` tells as a whole."""

    def end(self) -> Any:
        """The step came to its end: what is made of that, without a tensor of the run."""


Listeners = Callable[[], Listener]
"""Makes one for each trial run."""
