"""The torch functions that a piece of user code calls, so that two runs of it can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.program.constants import constants_of
from lightning_par.pipeline.program.event_draws import DRAWING, PartDrawn
from lightning_par.pipeline.program.microbatch_values import of_microbatch
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import returned_tensors, tensors_in
from lightning_par.sharded.functions import BY_ENTRY, DRAWS_EACH, OVERWRITES, PRECISIONS, SIZED
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.whole_draws import CutDraw

_ROWS_APART = BY_ENTRY | OVERWRITES | PRECISIONS | SIZED | DRAWS_EACH


@dataclass(frozen=True)
class Called:
    """One call of a torch function.

    Attributes:
        func: the function.
        given: its arguments: numbers and words as they are, tensors by where they came from.
        made: of each tensor that it returned, the shape, and whether that is of a part of the samples.
        parts: of what it drew for a part of the samples.
    """

    func: Any
    given: tuple[Any, ...]
    made: tuple[tuple[tuple[int, ...], bool], ...]
    parts: tuple[CutDraw, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", "")

    @property
    def keeps_rows_apart(self) -> bool:
        """Whether every entry of the result is made of one entry of each argument, or drawn."""
        return self.name in _ROWS_APART


class Trace:
    """The torch functions that a unit called, what each was given, and where that came from.

    Args:
        inputs: whose places count, not which tensors they are.

    Example::

        x, y = torch.ones(2), torch.ones(2)
        first, second = Trace([x]), Trace([y])
        first.note(torch.add, (x, 1), {}, x + 1)
        second.note(torch.add, (y, 1), {}, y + 1)
        assert first.calls == second.calls
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self.calls: list[Called] = []
        self.returned: tuple[tuple[int, ...], ...] = ()  # shapes
        self._known: dict[int, Any] = {id(x): ("given", n) for n, x in enumerate(inputs)}
        self._kept: list[Any] = [inputs]  # ids stay valid as long as the objects live

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, parts: Iterable[CutDraw] = ()) -> None:
        """``func`` was called; it drew ``parts``."""
        given = tuple(self._name(x) for x in tree_leaves((args, kwargs)))
        results = tensors_in(result)
        own = [of_microbatch(x) for x in results]
        made = tuple((tuple(part.shape), part is not x) for part, x in zip(own, results))
        self.calls.append(Called(func, given, made, tuple(parts)))
        self._known.update((id(x), ("made", len(self.calls), n)) for n, x in enumerate(results))
        self._kept.append((args, kwargs, result))

    def end(self, result: Any) -> None:
        """The unit has returned ``result``."""
        self.returned = tuple(tuple(of_microbatch(x).shape) for x in returned_tensors(result))

    @property
    def outline(self) -> tuple[Called, ...]:
        """The calls, of which tensors from elsewhere are told by the order in which they come: as in another unit."""
        places: dict[Any, Any] = {}

        def placed(name: Any) -> Any:
            elsewhere = isinstance(name, tuple) and name[:1] == ("other",)
            return places.setdefault(name, ("other", len(places))) if elsewhere else name

        return tuple(replace(call, given=tuple(map(placed, call.given))) for call in self.calls)

    def _name(self, value: Any) -> Any:
        if isinstance(value, (bool, int, str, type(None))):
            return value
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, (float, complex)) else str(value)
        if id(value) not in self._known:
            unknown = isinstance(value, (FakeTensor, ShardedTensor))
            self._known[id(value)] = ("other", id(value)) if unknown else constants_of(value, lambda _: False)
        return self._known[id(value)]

    def parts_drawn(self, plain: Trace, samples: int, own: int, positions: Positions) -> tuple[PartDrawn, ...]:
        """What the functions draw that draw, of which ``plain`` sees ``own`` of the ``samples``.

        Raises:
            SamplesMixError: it can't be told which part is whose.
        """
        found = []
        for call, other in zip(self.calls, plain.calls, strict=True):
            if call.name not in DRAWING:
                continue
            places = {*call.parts}
            for (shape, _), (part, _) in zip(call.made, other.made) if not places else ():
                differ = [d for d, (a, b) in enumerate(zip(shape, part)) if a != b]
                if differ and ((shape[differ[0]], part[differ[0]]) != (samples, own) or len(differ) > 1):
                    raise SamplesMixError(f"`{call.name}` draws {shape} for a batch, of which no dim is its samples")
                places.update((d, positions, None) for d in differ)
            if len(places) > 1:
                raise SamplesMixError(f"`{call.name}` draws several times for the samples of a batch")
            found.append(PartDrawn(call.name, *(places.pop() if places else (None, None, None))))
        return tuple(found)

    def agrees(self, plain: Trace, samples: int, own: int) -> bool:
        """Whether ``plain``, which sees ``own`` of the ``samples``, computed the same but for sizes that follow."""
        if len(self.calls) != len(plain.calls) or self.returned != plain.returned:
            return False  # it may return the whole batch's rows, made of no sample
        rows: set[Any] = set()  # what has a row for each sample, and is no value of samples
        for number, (call, other) in enumerate(zip(self.calls, plain.calls), 1):
            same = call.func == other.func and len(call.given) == len(other.given)
            if not same or not all(_follows(call, a, b, samples, own) for a, b in zip(call.given, other.given)):
                return False
            if len(call.made) != len(other.made):
                return False
            for n, ((shape, cut), (others, _)) in enumerate(zip(call.made, other.made)):
                if shape != others:
                    if cut:  # beside what has the whole batch's rows, such as a table that was made of its first
                        return False
                    rows.add(("made", number, n))
            if not rows.isdisjoint(call.given) and not call.keeps_rows_apart and not all(cut for _, cut in call.made):
                return False
        return True


def _follows(call: Called, viewed: Any, plain: Any, samples: int, own: int) -> bool:
    """Whether an argument is the same, or a size that follows the batch's where sizes may."""
    if viewed == plain and type(viewed) is type(plain):
        return True
    sizes = type(viewed) is int and type(plain) is int and call.name in SIZED
    return sizes and viewed * own == plain * samples


class Traced(Protocol):
    """A run that notes in its trace, if it has one, what is called."""

    trace: Trace | None


@contextmanager
def tracing(run: Traced, inputs: list[Tensor]) -> Iterator[Trace]:
    """Let ``run`` note what is called inside; see `Trace`."""
    before, run.trace = run.trace, Trace(inputs)
    try:
        yield run.trace
    finally:
        run.trace = before
