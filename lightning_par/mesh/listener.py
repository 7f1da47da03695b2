"""Who hears of the verbs that move tensors, besides those that they move them for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Verb = TypeVar("Verb", bound=Callable[..., Any])


class Listener:
    """Runs verbs itself while it is the thread's; see `lightning_par.sharded.local_calls.tape`."""

    def verb(self, run: Callable[..., Any], told: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``run`` with the arguments; ``told`` is the same, which the listener hears of again."""
        raise NotImplementedError

    def missed(self) -> None:
        """Something is done besides functions and verbs, as a report."""
        raise NotImplementedError


class _Thread(threading.local):
    listener: Listener | None = None


thread = _Thread()
"""Who listens to what this thread runs."""


def heard(run: Verb) -> Verb:
    """For a verb: whoever listens runs it."""

    @functools.wraps(run)
    def told(*args: Any, **kwargs: Any) -> Any:
        listener = thread.listener
        return run(*args, **kwargs) if listener is None else listener.verb(run, told, args, kwargs)

    return told  # type: ignore[return-value]
