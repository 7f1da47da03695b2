"""What stands for a number that is read from a value that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.sharded.functions import ARRAYS, TRUTHS, WHOLE_NUMBERS
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.trial.guesses import FLOATS, Guesses
from lightning_par.trial.watched_number import WatchedNumber


class AbsentNumber(WatchedNumber, float):
    """A number that only the last stage knows: arithmetic keeps that in mind, and to decide by it is noted.

    Where the batch is cut into microbatches, no one knows the whole batch's number while the step runs: what is decided
    by it is a guess, and a whole number made of it raises SamplesMixError.
    """

    cut = False  # whether the batch is cut in the run that is on
    draw = 0  # which numbers stand in
    count = 0  # of numbers so far
    guesses: Guesses | None = None  # of what the step decides by them, in the run that is on

    def computed(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        return AbsentNumber(result) if isinstance(result, float) else result

    def decided(self, result: Any, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        if isinstance(result, bool):
            return result if self.guesses is None else self.guesses.compare(result)
        _refuse_cut()
        return result


def _refuse_cut() -> None:
    """What is decided by a whole number can't be seen."""
    if AbsentNumber.cut:
        raise SamplesMixError(f"the step decides by a value of the whole batch at {user_line()}")


DRAWS = 3
"""So many runs with other numbers tell where they lead; the first draw is the one that programs are made with."""
_SCALES = (1.0, 1.0, -40.0)
_FILLS = (0, 1)  # of arrays, whose numbers may be indices
_TEXTS = (0.0, 1.0, 1e9, -1e9)
_WRITTEN_OUT = 1000  # entries of an array in a text


@contextmanager
def standing_in(cut: bool, draw: int, guesses: Guesses) -> Iterator[None]:
    """Around a trial run.

    Args:
        cut: whether the batch is cut into microbatches, so that no one knows the whole batch's numbers.
        draw: which numbers stand for them, below `DRAWS`.
        guesses: of what the step decides by them.
    """
    before = AbsentNumber.cut, AbsentNumber.draw, AbsentNumber.count, AbsentNumber.guesses
    AbsentNumber.cut, AbsentNumber.draw, AbsentNumber.count, AbsentNumber.guesses = cut, draw, 0, guesses
    try:
        yield
    finally:
        AbsentNumber.cut, AbsentNumber.draw, AbsentNumber.count, AbsentNumber.guesses = before


def _drawn(shape: tuple[int, ...] = ()) -> Any:
    """Other numbers at each place: the ratio of two must differ between draws, too."""
    AbsentNumber.count += 1
    uniform = np.random.RandomState(AbsentNumber.draw * 65_536 + AbsentNumber.count).uniform(0.5, 1.5, shape)
    return uniform * _SCALES[AbsentNumber.draw]


def _number(guess: float) -> float:
    return float(_drawn()) if AbsentNumber.draw else guess


def _array(x: Tensor, guess: int) -> Any:
    dtype = torch.empty((), dtype=x.dtype if x.dtype != torch.bfloat16 else torch.float32).numpy().dtype
    if AbsentNumber.draw == 0:
        return np.full(tuple(x.shape), guess, dtype)
    drawn = np.asarray(_drawn(tuple(x.shape)))
    if dtype.kind in "iub":  # an index must stay one
        return (abs(drawn / _SCALES[AbsentNumber.draw]) > 1).astype(dtype)
    return drawn.astype(dtype)


def says_yes_or_no(name: str, x: Tensor) -> bool:
    """Whether the function ``name``, which reads ``x``, gives no number, but True or False."""
    return name in TRUTHS or name == "item" and x.dtype is torch.bool


def read_placeholder(name: str, x: Tensor, args: Any) -> Any:
    """What the function ``name``, which reads ``x``, returns while ``x`` is absent.

    Numbers that can't be followed by themselves, since C code or numpy takes them, differ from draw to draw. Each read
    asks for a guess, in all draws: what is decided by such a number does not, and would let a loop run for ever.
    """
    guesses = AbsentNumber.guesses or Guesses()
    if name in WHOLE_NUMBERS:
        _refuse_cut()
    if says_yes_or_no(name, x):
        return guesses.read("__bool__", x, args)
    if name in WHOLE_NUMBERS:
        return guesses.read(name, x, args)
    if name in ("item", "__float__", "__complex__"):
        return AbsentNumber(_number(guesses.choose(FLOATS)))
    if name in ARRAYS:
        return _array(x, guesses.choose(_FILLS))
    if name == "tolist":
        return _array(x, guesses.choose(_FILLS)).tolist()
    return format(_to_write(x, guesses), args[1] if len(args) > 1 else "")


def _to_write(x: Tensor, guesses: Guesses) -> Any:
    """What stands in a text: a whole number may be a key, as in ``self.experts[f"expert_{index}"]``."""
    if x.ndim:  # written out, as in the message of an error; another format is refused as torch refuses it
        return _array(x, guesses.choose(_FILLS)).ravel()[:_WRITTEN_OUT].tolist()
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return _number(guesses.choose(_TEXTS))
    return _array(x, guesses.choose(_FILLS)).item()
