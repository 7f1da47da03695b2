"""Whether the global generators of numpy and ``random`` have moved: by their memory, as to be asked for their states
takes numpy a tenth of a millisecond."""

from __future__ import annotations

import ctypes
import random
from _random import Random
from typing import Any

import numpy as np

_HEAD = object.__basicsize__  # counts of references: these move without it
_Words = ctypes.c_char * (624 * 4 + 4)  # of the Mersenne Twister, and which of them comes next


def memory_of_numpy() -> Any:
    """Equal at two times only if numpy's global generator stands at the same place; None where that can't be told.

    numpy documents `BitGenerator.ctypes`, but not that a `RandomState` has all else that it goes by in itself, as the
    second of two normal numbers.
    """
    state: Any = np.random.mtrand._rand
    bits = state._bit_generator
    if type(bits) is not np.random.MT19937:
        return None
    return _Words.from_address(bits.ctypes.state_address).raw, _inside(state, np.random.RandomState)


def memory_of_random() -> Any:
    """As `memory_of_numpy`, for the generator of Python's ``random``."""
    state: Any = random.random.__self__  # type: ignore[attr-defined]
    return _inside(state, Random), state.gauss_next


def _inside(x: Any, kind: type) -> bytes:
    """What an object's memory has behind its head."""
    return _BEHIND[kind].from_address(id(x) + _HEAD).raw  # type: ignore[no-any-return]


_BEHIND: dict[type, Any] = {
    kind: ctypes.c_char * (kind.__basicsize__ - _HEAD) for kind in (Random, np.random.RandomState)
}
