"""Arrays and tensors that are too large to be copied for every run of a step, which may read them alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def reading(locked: list[str]) -> Iterator[None]:
    """A run may read ``locked`` arrays, and may not write them."""
    if not locked:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            yield
        except ValueError as error:
            if "read-only" in str(error):
                raise RuntimeError(too_large(locked)) from error
            raise


def too_large(places: list[str]) -> str:
    """What the user is told of state that is not copied."""
    return (
        f"The step changes a tensor or array in place that is too large to be copied for every run: "
        f"{', '.join(places)}. Register it as a buffer, or assign a new one."
    )
