"""Backward along axes whose ranks hold shares of replicated tensors' gradients; see `lightning_par.mesh.collectives`.

Every rank holds the whole loss, and each begins with its share of the loss's gradient: one part in as many as there are
ranks. What the user's code sees of a replicated tensor's gradient is summed, since it wants it whole: what
`torch.autograd.grad` gives, what a hook is handed, what ``x.grad`` holds. `backward_reach` does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.sharded import backward_reach
from lightning_par.sharded.aliases import innermost
from lightning_par.sharded.run_state import RunState

Axes = tuple[Axis, ...]


@contextlib.contextmanager
def shared_over(axes: Sequence[Axis]) -> Iterator[None]:
    """Within, gradients begin as shares over ``axes``; on all ranks of these."""
    state = RunState.current
    before, state.shared = state.shared, _shared(axes)
    try:
        yield
    finally:
        state.shared = before


def shared_around(axes: Sequence[Axis]) -> None:
    """From now on a backward outside any step, too, begins with shares over ``axes``, where ranks sum up gradients."""
    RunState.current.shared_between_steps = _shared(axes)


def _shared(axes: Sequence[Axis]) -> Axes:
    return tuple(axis for axis in axes if axis.gradient_shares and axis.size > 1)


def active() -> Axes:
    """The axes over which gradients are shares of what runs now, forward or backward."""
    return RunState.current.shared or RunState.current.shared_backward


@contextlib.contextmanager
def unshared(axes: Axes | None = None) -> Iterator[None]:
    """While a backward runs over ``axes``: what is called within it, as reentrant checkpointing does, has its share."""
    state = RunState.current
    before = state.shared, state.shared_backward
    state.shared, state.shared_backward = (), state.shared if axes is None else axes
    state.backwards += 1
    try:
        yield
    finally:
        state.shared, state.shared_backward = before
        state.backwards -= 1


def ranks() -> int:
    """How many ranks have a share of a replicated tensor's gradient now."""
    return backward_reach.ranks(RunState.current.shared)


def end(x: Any) -> Any:
    """Where the graph of ``x`` is on this rank."""
    return innermost(x)


@contextlib.contextmanager
def watched(synced: bool) -> Iterator[None]:
    """Around a backward: who syncs gradients begins and ends with the outermost one, if that has any to be synced."""
    state = RunState.current
    told = [one for one in (ref() for ref in state.syncs) if one] if synced and not state.backwards else []
    state.backwards += 1
    try:
        for one in told:
            one.begin()
        yield
    except BaseException:  # user code may go on
        for one in told:
            one.abandon()
        raise
    finally:
        state.backwards -= 1
    for one in told:  # not after an error: it talks to ranks that may not have come this far
        one.end()


def watch_looks() -> None:
    """A backward runs of which who syncs gradients is told later: its hooks may look at shares."""
    for one in (ref() for ref in RunState.current.syncs):
        if one is not None:
            one.watch_looks()
