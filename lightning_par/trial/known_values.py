"""Which real tensors, in a run on tensors without values, have values: those that nothing unknown was written into."""

from __future__ import annotations

from torch import Tensor

from lightning_par.private.fake_tensors import active_fakes
from lightning_par.private.storage import storage_of

_LOST = "_lightning_par_lost"  # of memory
_WRITTEN = "_lightning_par_written"


def forget(x: Tensor) -> None:
    """Something that is not known was written to ``x``: it, and what shares its memory, has no values any more.

    Where no tensors are fake, as before a run, nothing is unknown.

    Example::

        forget(x)
        assert not is_known(x) and not is_known(x[0])
    """
    storage = storage_of(x)
    if storage is not None and active_fakes() is not None:
        setattr(storage, _LOST, True)


def count_write(x: Tensor) -> None:
    """A function has written into ``x``, known or not; to be called of each, by the mode that sees them all."""
    storage = storage_of(x)
    if storage is not None:
        setattr(storage, _WRITTEN, times_written(x) + 1)


def times_written(x: Tensor) -> int:
    """How often functions have written into the memory of ``x``, which tells whether it may hold something else where
    values can't be compared.

    Example::

        before = times_written(x)
        x.mul_(2)
        assert times_written(x) > before
    """
    return getattr(storage_of(x), _WRITTEN, 0)


def is_known(x: Tensor) -> bool:
    """Whether the real ``x`` has its values still."""
    storage = storage_of(x)
    return storage is not None and not hasattr(storage, _LOST)
