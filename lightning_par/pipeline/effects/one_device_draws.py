"""Random numbers of a stage that are one device's; see `lightning_par.pipeline.effects.random_draws`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.effects.random_draws import Draws, KeyedDraws, StageDraws
from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.event_draws import DRAWING, OfBatch, PartDrawn, are_equal, stand_at, standing
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.private.fake_tensors import active_fakes
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.random_streams import Streams
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.whole_draws import WholeDraws
from lightning_par.sharded.wrapped_tensors import run_by_wrapper


class OtherDrawsError(RuntimeError):
    """A stage draws other random numbers than the trial of the step has seen."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} draws other random numbers than when the step was recorded, so that the other stages don't know "
            "where one device would draw on. How many numbers a module draws must not depend on values, nor on what "
            "the step sets: set a dropout's rate that was 0 before the step, as in on_train_batch_start. Or write "
            "draws='per_shard', or use TensorParallelStrategy."
        )


def stage_draws(key: Sequence[int], program: Program, memo: BatchValues, axis: MicrobatchAxis | None) -> StageDraws:
    """What a run of a stage draws, on one microbatch or on the whole batch."""
    return OneDeviceDraws(program, memo, axis) if RunState.current.streams.whole else KeyedDraws(key)


class OneDeviceDraws:
    """Draws of one device.

    Args:
        program: of the step.
        memo: of the batch, with where the generators stand.
        axis: the microbatch, None where the batch is not cut.
    """

    def __init__(self, program: Program, memo: BatchValues, axis: MicrobatchAxis | None) -> None:
        self.program, self.memo, self.axis = program, memo, axis

    def at(self, event: int) -> None:
        if event in self.memo.regions:
            stand_at(self.memo.regions[event])

    def several(self, seeds: bool, looks: bool) -> contextlib.AbstractContextManager[Draws | None]:
        return contextlib.nullcontext()

    def of(self, event: int, what: Any, kwargs: Any = None) -> contextlib.AbstractContextManager[Any]:
        draws = what.training if isinstance(what, nn.Module) else getattr(what, "__name__", "") in DRAWING
        return self._standing(event, kwargs) if draws or event in self.memo.stood else contextlib.nullcontext()

    @contextlib.contextmanager
    def _standing(self, event: int, kwargs: Any) -> Iterator[None]:
        record, stood = self.program.events[event], self.memo.stood.get(event)
        if stood is not None:
            stand_at(stood[0])
        before = standing() if stood is None else stood[0]
        own = None if not kwargs else kwargs.get("generator")
        with contextlib.nullcontext() if own is None else self.kept((event, 0), own):
            if self.axis is None or record.viewed or not record.parts:
                yield
            else:
                with PartDraws(self, event, record.parts):
                    yield
        retold = self.axis is not None and self.axis.rank > 0  # what it drew, it may have had from the first microbatch
        if stood is not None and (retold or active_fakes() is not None):  # and fakes draw nothing
            stand_at(stood[1])
        elif not are_equal(standing(), before if stood is None else stood[1]):
            raise OtherDrawsError(f"{record.func!r}" if isinstance(record.func, str) else f"the step at {record.place}")

    @contextlib.contextmanager
    def kept(self, place: tuple[int, int], own: torch.Generator) -> Iterator[None]:
        """Around a draw from a generator of the user's own: each microbatch draws from where the first one drew, and
        the generator moves on once."""
        if self.axis is None:
            yield
            return
        now, known = own.get_state(), self.memo.own_generators.get(place)
        if known is None:
            self.memo.own_generators[place] = now
            yield
            return
        own.set_state(known)
        yield
        own.set_state(now)


class Noting(WholeDraws):
    """Draws for the batch, and keeps what the other microbatches have of it.

    Args:
        dim: see `WholeDraws`.
        positions: of the microbatches.
        rank: the one that runs.
        found: what is kept.
        count: of the microbatches; 0 where nothing is to be kept.
    """

    def __init__(self, dim: int, positions: Positions, rank: int, found: OfBatch, count: int) -> None:
        super().__init__(dim, positions, rank)
        self.found, self.count = found, count

    def drawn(self, draw: Callable[[], Tensor], mask: bool = False) -> Tensor:
        whole = draw()
        if self.count:
            kept = whole.bool() if mask else whole  # a byte for each entry
            others = [rank for rank in range(self.count) if rank != self.rank]
            self.found.parts.append({rank: self.part(kept, rank).clone() for rank in others})
        return self.part(whole, self.rank)

    def goes_by_entries(self) -> None:
        self.found.whole = False


class Retold(WholeDraws):
    """Has what the first microbatch kept.

    Args:
        dim: see `WholeDraws`.
        positions: of the microbatches.
        rank: the one that runs.
        own: what it has of what operations drew, in order.
    """

    def __init__(self, dim: int, positions: Positions, rank: int, own: list[Tensor]) -> None:
        super().__init__(dim, positions, rank)
        self.own = own

    def drawn(self, draw: Callable[[], Tensor], mask: bool = False) -> Tensor:
        if not self.own:
            raise OtherDrawsError(f"What runs at {user_line()}")
        return self.own.pop(0)


class PartDraws(TorchFunctionMode):
    """Within a unit, functions draw a microbatch's part of what they draw for the batch.

    Args:
        draws: of the stage.
        event: the call of the unit.
        parts: of what functions draw, in order.
    """

    def __init__(self, draws: OneDeviceDraws, event: int, parts: Sequence[PartDrawn]) -> None:
        super().__init__()
        self.draws, self.event, self.parts = draws, event, parts
        assert draws.axis is not None
        self.rank, self.count = draws.axis.rank, draws.axis.size

    def __enter__(self) -> Any:
        streams = RunState.current.streams
        self._before, streams.unit, streams.drawn_in_unit = (streams.unit, streams.drawn_in_unit), self, 0
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        streams = RunState.current.streams
        streams.unit, streams.drawn_in_unit = self._before
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in DRAWING:
            return func(*args, **kwargs)
        if (result := run_by_wrapper(self, func, types, args, kwargs)) is not NotImplemented:
            return result
        streams: Streams = RunState.current.streams
        number, streams.drawn_in_unit = streams.drawn_in_unit, streams.drawn_in_unit + 1
        part = self.parts[number] if number < len(self.parts) else None
        if part is None or part.name != name:
            raise OtherDrawsError(f"`{name}` at {user_line()}")
        own = kwargs.get("generator")
        with contextlib.nullcontext() if own is None else self.draws.kept((self.event, number), own):
            with self._drawing(number, part, next((x.shape for x in tensors_in((args, kwargs))), None)):
                return func(*args, **kwargs)

    def _drawing(
        self, number: int, part: PartDrawn, shape: torch.Size | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Around a function that draws for a tensor of ``shape``: the first microbatch draws for all."""
        kept, place = self.draws.memo.of_functions, (self.event, number)
        first = place not in kept
        if first:
            kept[place] = OfBatch(standing())
        own = None if first else kept[place].take(self.rank)
        if not first and own is None:
            stand_at(kept[place].stood)
        if part.dim is None or part.positions is None:
            kept[place].whole = False
            return contextlib.nullcontext()
        if own is not None:
            return Retold(part.dim, part.positions, self.rank, own)
        noting = Noting(part.dim, part.positions, self.rank, kept[place], self.count if first else 0)
        noting.lies = None if shape is None or part.strides is None else (shape, part.strides)
        return noting

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what is computed again in backward draws as the first time; `Streams` say how far that had come."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)
