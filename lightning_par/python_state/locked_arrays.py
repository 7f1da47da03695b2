"""Arrays and tensors that are too large to be copied for every run of a step, which may read them alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_MOST = 8  # names in a message


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
    more = f" and {len(places) - _MOST} more" if len(places) > _MOST else ""
    return (
        f"The step changes a tensor or array in place that is too large to be copied for every run: "
        f"{', '.join(places[:_MOST])}{more}. Register it as a buffer, or assign a new one."
    )
