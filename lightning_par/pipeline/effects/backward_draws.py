"""Random numbers that are drawn in backward, by hooks on gradients and by autograd functions of the user's.

Each stage's backward runs on one rank, within the step; on one device all of them run behind it, from the last layer to
the first. So they draw from streams of their own, and the shared generators, which stand alike on all ranks, stay where
they are. What activation checkpointing computes again puts them back itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from lightning_par.pipeline.effects.random_draws import Keyed
from lightning_par.pipeline.program.event_draws import are_equal, stand_at, standing
from lightning_par.private.fake_tensors import active_fakes
from lightning_par.sharded.run_state import RunState


def drawing_in_backward(
    key: Sequence[int], what: str, drew: list[str] | None = None, told: Callable[[], object] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Around a backward, or what runs within one.

    Args:
        key: what its stream is keyed by.
        what: runs in it, for the message.
        drew: takes the message, where it is to be told later.
        told: called if something draws from that stream.

    Raises:
        NotImplementedError: something draws, and draws are to be one device's.

    Example::

        with drawing_in_backward((seed, step, microbatch, stage), "a hook of stage 1"):
            loss.backward()
    """
    if RunState.current.streams.whole:
        return _refusing(what, drew)
    return Keyed(key) if told is None else _telling(key, told)


@contextlib.contextmanager
def _telling(key: Sequence[int], told: Callable[[], object]) -> Iterator[None]:
    with Keyed(key):
        before = standing()
        yield
        drew = not are_equal(standing(), before)
    if drew:
        told()


@contextlib.contextmanager
def _refusing(what: str, drew: list[str] | None) -> Iterator[None]:
    before = standing()
    yield
    if active_fakes() is not None or are_equal(standing(), before):
        return
    stand_at(before)
    message = (
        f"{what} draws random numbers in backward, which one device does behind the whole step, from the last layer to "
        "the first, and a pipeline stage by stage. Write draws='per_shard', or use TensorParallelStrategy."
    )
    if drew is None:
        raise NotImplementedError(message)
    drew.append(message)
