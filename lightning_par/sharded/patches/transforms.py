"""What takes no sharded tensors, and asks no ``__torch_function__``, is handed whole ones: ``torch.vmap``, the
transforms of ``torch.func``, and flex attention.

Inside a transform nothing is sharded: a sharded tensor that the transformed function closes over is gathered where it
is met (`lightning_par.sharded.rules.lookup`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lightning_par.private.modes import innermost_mode
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.transforms import in_functorch, outside_transforms, transforms, without_saved_tensors_hooks
from lightning_par.sharded import gradient_shares
from lightning_par.sharded.aliases import innermost
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.rules.alias import Alias
from lightning_par.sharded.rules.lookup import announce_gather, moves, sharded_again
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.function_recorder import Recorder

TRANSFORMS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""What is called in place of the functions at which transforms begin."""


def patches() -> list[Replacement]:
    """Of the functions at which they begin."""
    grad = torch.autograd.grad
    return [
        Replacement(module, name, _unshared if public is grad else functools.partial(_handed_whole, public))
        for module, name, public in transforms()
    ]


def _handed_whole(public: Callable[..., Any], entry: Any, use: Use) -> Any:
    """``entry``, at which ``public`` begins, given whole tensors."""
    ends = public.__name__ != "flex_attention"  # what the others return is what the user gets

    run = _unhooked(entry) if ends else entry

    @functools.wraps(entry)
    def call(*args: Any, **kwargs: Any) -> Any:
        from lightning_par.pipeline.run.located import Run

        if not use.on:
            return entry(*args, **kwargs)
        if ends and Run.current is not None and not Run.current.depth:  # no torch function, but an event of the step
            return Run.current.__torch_function__(call, (), args, kwargs)
        recorder = innermost_mode()
        if isinstance(recorder, Recorder):
            recorder.took_by(public, (args, kwargs))
        given = tree_leaves((args, kwargs))
        views = [x for x in given if isinstance(x, ShardedTensor)]
        if any(isinstance(x, Alias) for x in given):
            args, kwargs = tree_map(lambda x: innermost(x) if isinstance(x, Alias) else x, (args, kwargs))
        if not views:
            return run(*args, **kwargs)
        announce_gather(public, views)
        with outside_transforms():
            wholes = {id(x): x.full_tensor() for x in views}
        args, kwargs = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
        result = run(*args, **kwargs)
        again = ends and any(map(moves, views)) and not in_functorch()
        # A function that vjp returns takes whole gradients of the whole result.
        return sharded_again(result, views) if again and not any(map(callable, tree_leaves(result))) else result

    if ends:
        TRANSFORMS.add(call)
    return call


def _unhooked(entry: Callable[..., Any]) -> Callable[..., Any]:
    """``entry``, which refuses to run where something is done to what is saved for backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_saved_tensors_hooks():
            return entry(*args, **kwargs)

    return run


def _unshared(entry: Any, use: Use) -> Any:
    """``entry``, which asks for gradients of whole tensors within a transform: they are no shares."""

    @functools.wraps(entry)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not use.on:
            return entry(*args, **kwargs)
        with gradient_shares.unshared():
            return entry(*args, **kwargs)

    return call
