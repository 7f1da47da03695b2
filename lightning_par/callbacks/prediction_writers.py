"""Callbacks that must not do on every rank what one rank of a replica does for all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.strategies.namespace import Namespace

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


def write_predictions_once(callbacks: Iterable[Any], replica: Axis, namespace: Namespace) -> None:
    """Let a ``BasePredictionWriter`` write on the first rank of each replica only: the others hold the same."""
    if replica.rank > 0:
        kind = namespace.from_pytorch("callbacks", "BasePredictionWriter")
        for callback in callbacks:
            if isinstance(callback, kind):
                vars(callback).update(dict.fromkeys(_WRITES, _nothing))


def restore_writers(callbacks: Iterable[Any]) -> None:
    """Undo `write_predictions_once`."""
    for callback in callbacks:
        for name in _WRITES:
            if vars(callback).get(name) is _nothing:
                del vars(callback)[name]


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def refuse_batch_size_finder(trainer: Any, world: Axis, namespace: Namespace) -> None:
    """
    Raises:
        ValueError: a ``BatchSizeFinder`` is among the callbacks, as `Tuner.scale_batch_size` puts it there, and will
            run: Lightning skips it in a ``fast_dev_run``.
    """
    kind = namespace.from_pytorch("callbacks", "BatchSizeFinder")
    if world.size > 1 and not trainer.fast_dev_run and any(isinstance(one, kind) for one in trainer.callbacks):
        raise ValueError(
            f"Tuner.scale_batch_size() and BatchSizeFinder run until memory is short, which one of the {world.size} "
            "ranks may meet alone while the others wait for it. Find the batch size with devices=1, or set it by hand."
        )
