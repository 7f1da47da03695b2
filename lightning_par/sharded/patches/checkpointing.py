"""A region that `torch.utils.checkpoint` runs again draws the sharded random numbers of its first run.

It is run again on this rank's parts of its arguments, which torch keeps with the graph behind them even if the region
lies in another one. In a pipeline's step it is run again as one, or each call in it by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lightning_par.private.graph import checkpoint_generator
from lightning_par.sharded.aliases.frames import framed, frames_of, innermost
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, remembered


def patch() -> Replacement:
    """Of the generator function behind non-reentrant checkpointing."""
    return Replacement(*checkpoint_generator(), _drawing_again)


def _drawing_again(plain: Any, use: Use) -> Any:
    named = [p for p in inspect.signature(plain).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(plain)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from lightning_par.pipeline.run.located import Run

        if not use.on:
            return plain(fn, *args, **kwargs)

        def around(fn: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
            again, parts = _on_parts(replaying(fn), rest)
            return plain(again, *args[: len(named) - 1], *parts, **kwargs)

        if Run.current is not None:
            Run.current.recomputes = True
        whole = around(fn, *args[len(named) - 1 :], **kwargs)
        return whole if Run.current is None or Run.current.depth else _by_run(Run.current, whole, around)

    return generator


def _on_parts(fn: Callable[..., Any], given: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """``fn`` of this rank's parts of what is ``given``, and these; in a view of a part autograd sees no graph."""
    views = [_view_like(x) if type(x) is ShardedTensor else None for x in given]
    if not any(views):
        return fn, given

    @functools.wraps(fn)
    def run(*parts: Any, **kwargs: Any) -> Any:
        return fn(*(x if view is None else view(x) for x, view in zip(parts, views, strict=True)), **kwargs)

    return run, [x if view is None else innermost(x) for x, view in zip(given, views, strict=True)]


def _view_like(x: ShardedTensor) -> Callable[[Any], Any]:
    """What makes of another part what ``x`` is of its own, whose memory may go meanwhile."""
    frames, strides = frames_of(x), remembered(x)

    def view(part: Any) -> Any:
        again = framed(part, frames)
        again._strides = strides
        return again

    return view


def _by_run(run: Any, whole: Any, around: Callable[..., Any]) -> Any:
    """The region between the steps of the generator ``whole``, run again as one, or each call in it by itself."""

    def by_itself(call: Callable[[], Any]) -> Any:
        steps = _unseen(run, around(call))
        next(steps)
        result = call()
        next(steps, None)
        return result

    with run.region(by_itself) as as_one:
        if as_one:
            yield from _unseen(run, whole)
        else:
            yield


def _unseen(run: Any, steps: Any) -> Any:
    """``steps``, whose own functions, as torch 2.11 and 2.12 have some, are no events of the run."""
    try:
        with run.aside():
            next(steps)
        yield
        with run.aside():
            next(steps, None)
    finally:
        steps.close()


def replaying(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, about to run, which draws the same sharded random numbers when it is run again.

    Torch runs the non-reentrant kind's forward on ``fn`` itself: what is returned may run first in backward.
    """
    streams = RunState.current.streams
    first = dataclasses.replace(streams)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if streams == first:  # this is the first run
            return fn(*args, **kwargs)
        after = dataclasses.replace(streams)
        vars(streams).update(vars(first))
        elsewhere = streams.unit is not None and streams.unit is not after.unit
        try:
            with streams.unit.again() if elsewhere else contextlib.nullcontext():
                return fn(*args, **kwargs)
        finally:
            vars(streams).update(vars(after))  # what comes after is to draw what it would have drawn

    return run
