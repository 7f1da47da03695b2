"""Arrays and tensors that are too large, or too many, to be copied for every run of a step: it may read them alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from lightning_par.python_state.lent_tensors import ITEMS, SMALL

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
                raise RuntimeError(not_copied(locked)) from error
            raise


def not_copied(places: list[str]) -> str:
    """What the user is told of state that is not copied."""
    more = f" and {len(places) - _MOST} more" if len(places) > _MOST else ""
    return (
        f"The step changes a tensor or array in place of which its runs have no copies: {', '.join(places[:_MOST])}"
        f"{more}. They have copies of buffers, of other tensors and arrays of up to {SMALL:,} entries, and of tensors "
        f"in lists and dicts of up to {ITEMS} items. Register it as a buffer, or assign a new one."
    )
