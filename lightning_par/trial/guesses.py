"""What a trial run tells the user's code of values that are not there, and the search for what lets it go on.

A trial computes no values of the model. Where the code asks for one (``if torch.isnan(x).any()``, ``x.item()``) it is
told a guess: a belief, and what is planned by it must be right whatever the run will decide. Where the user's code
raises after a guess, or does not come to all of the model, `explore` runs the trial again with other guesses. A loop
that values alone would end is stopped after some turns; shuffled guesses end it in the next trial.
"""

from __future__ import annotations

import functools
import itertools
import sys
from binascii import crc32
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_par.sharded.functions import TRUTHS, WHOLE_NUMBERS
from lightning_par.trial.guessed_number import guessed

TRIES = 16  # trials in all
_IN_VAIN = 6  # trials in a row that came to no more
# Asked more often, with so many functions meanwhile and no parameter that was not met before, a question is one of an
# endless loop. A turn of one that generates text is a run of the whole model: few tell.
_ENDLESS = ((8, 2_000), (100, 1_000), (300, 0))
_PATIENT = ((5_000, 0), (100, 10_000))  # where no answers end the loop: it may be none
_CALLERS = 12  # frames that tell one use of a helper from another

Pattern = Literal["first", "other", "shuffled", "patient"]
Key = tuple[Any, ...]
Patterns = Mapping[Key, Pattern]
T = TypeVar("T")

_ALL: Key = ("all questions",)
_TRUTHS = (False, True)
FLOATS = (1.0, 0.0, 1e9, -1e9)
_INTS = (1, 0, 64, -1)
_OF_TENSORS = Tensor.backward.__module__  # which has no public name
_PLUMBING = ("lightning_par.", _OF_TENSORS, "torch.overrides", "torch.functional", "torch.nn.modules.module")


class EndlessError(BaseException):
    """The code asks the same question again and again; no ``except Exception`` of the user's goes on after it."""


class Guesses:
    """The answers of one trial run: the first that come to mind, save where ``patterns`` say otherwise.

    Args:
        patterns: how a question is answered, by where it is asked.
        bounded: whether a question may be asked only so often; not where a run goes as a trial went.

    Attributes:
        asked: the questions, with how often they were asked; the latest last.
        endless: the question of an endless loop, once there is one.
        work: how many torch functions have run.

    Example::

        guesses = Guesses()
        assert not guesses.read("__bool__", torch.empty((), device="meta"))
        assert len(guesses.asked) == 1
    """

    def __init__(self, patterns: Patterns | None = None, bounded: bool = True) -> None:
        self.patterns, self.bounded = dict(patterns or {}), bounded
        self.asked: dict[Key, int] = {}
        self.endless: Key | None = None
        self.work = 0
        self._callers: dict[Key, dict[Key, None]] = {}  # of each question, the latest last
        self._met: set[int] = set()  # parameters, by id
        self._repeats: dict[Key, _Repeats] = {}
        self._decisions: set[Key] = set()
        self.answers: list[bool] = []  # to decisions, in order
        self.ended = False  # whether the run came to its end; whoever runs it says so

    def ran(self, given: Iterable[Any]) -> None:
        """Whoever runs a torch function says so, and what that is ``given``."""
        self.work += 1
        self._met.update(id(x) for x in given if isinstance(x, nn.Parameter))

    def read(self, name: str, x: Tensor, args: tuple[Any, ...] = ()) -> Any:
        """What the function ``name`` of `lightning_par.sharded.functions.READS`, which reads ``x``, returns.

        Args:
            name: of the function.
            x: has a shape and a dtype.
            args: of the function, ``x`` among them.

        Raises:
            EndlessError: in a loop that would not end.
        """
        if name in TRUTHS:
            return self.choose(_TRUTHS)
        if name in WHOLE_NUMBERS:
            return self.choose(_INTS)
        value = self.choose(_of_dtype(x))
        if name == "item":
            return guessed(value, self.compare)
        if name == "__format__":
            return format([value] if x.ndim else value, args[1] if len(args) > 1 else "")
        if name in ("__float__", "__complex__"):
            return float(value) if name == "__float__" else complex(value)
        whole = torch.empty(0, dtype=x.dtype).numpy() if name != "tolist" else np.empty(0)
        array = np.full(tuple(x.shape), value, whole.dtype if name != "tolist" else None)
        return array.tolist() if name == "tolist" else array.astype(*args[1:2]) if name == "__array__" else array

    def compare(self, natural: bool) -> bool:
        """A decision by a number that was read, which by its guessed value would come out ``natural``."""
        return bool(self.choose((natural, not natural)))

    @property
    def loop(self) -> list[Key]:
        """The questions of an endless loop that may end it."""
        often = 0 if self.endless is None else self.asked[self.endless] // 8
        return [place for place, count in self.asked.items() if count > often > 0]

    @property
    def latest(self) -> Key:
        """The question that was asked last, by who called for it."""
        return next(reversed(self._callers[next(reversed(self.asked))]))

    @property
    def decided(self) -> list[Key]:
        """The questions that were answered yes or no, each by all who called for it."""
        return [caller for place in self.asked if place in self._decisions for caller in self._callers[place]]

    def decided_after(self, caller: Key) -> list[Key]:
        """Those of `decided` that were last asked after one of them."""
        order = [*self.asked]
        behind = order[order.index(caller[1]) + 1 :] if caller[1] in self.asked else []
        return [later for place in behind if place in self._decisions for later in self._callers[place]]

    def with_other(self, caller: Key) -> dict[Key, Pattern]:
        """Patterns that differ in the answer to one question of `decided`."""
        was = self.patterns.get(caller) or self.patterns.get(caller[1])
        return {**self.patterns, caller: "first" if was == "other" else "other"}

    def others(self) -> Iterator[dict[Key, Pattern]]:
        """Patterns that differ in one answer, the likeliest to help first: decisions before numbers, the last first."""
        if self.endless is not None:
            yield {**self.patterns, **dict.fromkeys(self.loop, "shuffled")}  # type: ignore[dict-item]
            yield {**self.patterns, self.endless: "other"}
            yield {**self.patterns, _ALL: "patient"}
            return
        latest = sorted(self.asked, key=lambda place: place in self._decisions)[::-1]
        for place in latest:
            pattern = self.patterns.get(place, "first")
            if pattern in ("first", "shuffled"):  # what ended a loop may have failed a check in it
                yield {**self.patterns, place: "other" if pattern == "first" else "first"}
        for place in latest:
            callers = self._callers[place]
            for caller in reversed(callers) if len(callers) > 1 else ():  # a helper that several ask by
                yield {**self.patterns, caller: "first" if self.patterns.get(place) == "other" else "other"}

    def choose(self, options: tuple[Any, ...]) -> Any:
        """One of ``options``, the first of which comes to mind, in answer to what the user's code asks here.

        Raises:
            EndlessError: in a loop that would not end.
        """
        place, caller = _asking()
        count = self.asked.pop(place, 0)
        self.asked[place] = count + 1
        callers = self._callers.setdefault(place, {})
        callers.pop(caller, None)
        callers[caller] = None
        if isinstance(options[0], bool):
            self._decisions.add(place)
        pattern = self.patterns.get(caller) or self.patterns.get(place)
        if self.bounded:
            self._bound(place)
        answer = options[1 if pattern == "other" else 0]
        if pattern == "shuffled" and count:  # ends what loop there may be, after a turn or more
            # the same in all processes, wherever the file lies
            answer = options[crc32(repr((*place[1:], count)).encode()) % len(options)]
        return self._decided(answer) if isinstance(answer, bool) else answer

    def _decided(self, answer: bool) -> bool:
        self.answers.append(answer)
        return answer

    def _bound(self, place: Key) -> None:
        repeats = self._repeats.get(place)
        if repeats is None or repeats.met < len(self._met):
            repeats = self._repeats[place] = _Repeats(len(self._met), self.work)
        repeats.turns += 1
        bounds = _PATIENT if _ALL in self.patterns else _ENDLESS
        if any(repeats.turns > turns and self.work - repeats.since >= work for turns, work in bounds):
            self.endless = place
            raise EndlessError(f"{place[0]}:{place[1]} asks for a value of the model again and again")


@dataclass
class _Repeats:
    """How often a question was asked while nothing new was met.

    Attributes:
        met: parameters so far.
        since: the work when it was asked first.
        turns: how often it was.
    """

    met: int
    since: int
    turns: int = 0


class RepeatedGuesses(Guesses):
    """Decides as another run did, whatever numbers it is told."""

    def __init__(self, run: Guesses) -> None:
        super().__init__(run.patterns)
        self._told = run.answers

    def _decided(self, answer: bool) -> bool:
        place = len(self.answers)
        return super()._decided(self._told[place] if place < len(self._told) else answer)


def _of_dtype(x: Tensor) -> tuple[Any, ...]:
    if x.dtype is torch.bool:
        return _TRUTHS
    return FLOATS if x.dtype.is_floating_point or x.dtype.is_complex else _INTS


def _asking() -> tuple[Key, Key]:
    """Where the user's code asks: the instruction; and the same with those that called it."""
    frame = sys._getframe(1)
    places: list[Key] = []
    while frame is not None and len(places) < _CALLERS:
        if not frame.f_globals.get("__name__", "").startswith(_PLUMBING):
            places.append((frame.f_code.co_filename, frame.f_lineno, _piece(frame.f_code, frame.f_lasti)))
        frame = frame.f_back  # type: ignore[assignment]
    return places[0], ("by", *places)


@functools.lru_cache(maxsize=10_000)
def _piece(code: CodeType, instruction: int) -> int:
    """Where the instructions for a piece of source start: Python exchanges those that have run often for others."""
    start = instruction // 2
    if sys.version_info >= (3, 11):
        pieces = [*itertools.islice(code.co_positions(), start + 1)]
        while start and pieces[start - 1] == pieces[-1]:
            start -= 1
    return start


@dataclass
class Trial(Generic[T]):
    """What one trial run came to.

    Attributes:
        value: what it is for.
        guesses: by which it ran.
        worth: the larger, the better.
        done: whether none can be better.
    """

    value: T
    guesses: Guesses
    worth: tuple[float, ...]
    done: bool


def explore(run: Callable[[Guesses], Trial[T]], patterns: Patterns | None = None) -> Trial[T]:
    """The best of some trials. The first goes by ``patterns``; each of the others answers one question otherwise.

    Args:
        run: runs one, whatever the user's code raises.
        patterns: of guesses that did before.

    Example::

        def run(guesses):
            asks = guesses.read("__bool__", torch.empty((), device="meta"))
            return Trial("went on" if asks else "raised", guesses, (float(asks),), done=asks)

        assert explore(run).value == "went on"
    """
    best = run(Guesses(patterns))
    path, seen, in_vain = [best], [best.guesses.patterns], 0
    while path and not best.done and len(seen) < TRIES and in_vain < _IN_VAIN:
        before = path[-1].guesses.patterns
        again = _ALL not in before and any(_ALL in patterns for patterns in seen)  # patience was of no use
        found = (x for x in path[-1].guesses.others() if x not in seen and not (again and _ALL in x))
        other = next(found, None)
        if other is None:
            path.pop()
            continue
        seen.append(other)
        trial = run(Guesses(other))
        in_vain = 0 if trial.worth > best.worth else in_vain + 1
        if in_vain == 0 or any(trial.guesses.patterns.get(place) != "shuffled" for place in trial.guesses.loop):
            path.append(trial)  # it came further, or into a loop that other answers may end
        best = trial if in_vain == 0 else best
    return best
