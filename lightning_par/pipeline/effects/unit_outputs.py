"""What units log, print by the module or give to loggers: each is heard on its own rank, and told to all.

On one device a unit runs once for a batch. Where the batch is cut, what it says of the microbatches is put together as
the trial of the step has found that it can be: see `lightning_par.pipeline.trial.unit_logs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import refusal
from lightning_par.pipeline.effects.console import Said, SayingCall
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.logged_outputs import LogRecord, OutputRecorder, Recorder, Unheard, call_of
from lightning_par.pipeline.program.prepared_step import Prepared
from lightning_par.pipeline.run.microbatch_outputs import averaged, joined
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor, full

if TYPE_CHECKING:
    from lightning_par.pipeline.effects.watched_run import Watch

Record = TypeVar("Record", LogRecord, Said)


@dataclass
class _Told:
    """What the units of a rank have said, or why it can't be told.

    Attributes:
        logs: in the order of the step.
        said: likewise.
        here: of the tensors in these, which lay where the rank computes.
        refused: in words.
    """

    logs: list[LogRecord] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    here: list[bool] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class UnitOutputs:
    """Collects what units say in one step.

    Args:
        watch: of the module.
        axis: the pipeline axis.
        device: of this rank.
        ready: the step.
        foreseen: whether the ranks wait for what units say; None where nothing of it counts.

    Example::

        outputs = UnitOutputs(watch, axis, device, ready, foreseen=True)
        with watch.undone(batch, hear=outputs.recorder(run, None)):
            ...  # run a stage
        effects = outputs.with_those(effects)
    """

    def __init__(self, watch: Watch, axis: Axis, device: torch.device, ready: Prepared, foreseen: bool | None) -> None:
        self.watch, self.axis, self.device, self.ready, self.foreseen = watch, axis, device, ready, foreseen
        self._parts: dict[int, list[Effects]] = {}  # by stage, of its microbatches

    def recorder(self, run: StageRun, effects: Effects | None) -> Recorder:
        """Takes what ``run`` says, which starts now.

        Args:
            run: of a stage, or of the tail.
            effects: take what the step's own code says; None if that does not count.
        """
        own = None if effects is None else self._recorder(effects, run)
        within: Recorder | None = None
        if self.foreseen:
            said = Effects()
            self._parts.setdefault(run.stage, []).append(said)
            within = self._recorder(said, run)
        elif self.foreseen is not None:
            within = Unheard(_refuse_unforeseen)
        return _ByDepth(run, own, within)

    def _recorder(self, effects: Effects, run: StageRun) -> OutputRecorder:
        return OutputRecorder(self.watch.lightning_module, effects.logs, effects.said, self.watch.names, run)

    def with_those(self, effects: Effects) -> Effects:
        """``effects`` of the step's own code with what units have said, as one device has it; all ranks call it.

        Raises:
            TypeError: something that units have logged or given to a logger can't be sent, or put together.
        """
        if not self.foreseen:
            return effects
        told = [self._told()] if self.axis.size == 1 else self.axis.all_gather_object(self._told(), "said by layers")
        refused = [reason for one in told for reason in one.refused]
        if refused:
            raise TypeError(" ".join(refused))
        for one in told:
            one.logs, one.said = self._placed(one)
        # what a unit says comes behind what the step has said before it
        effects.logs[:] = sorted([x for one in told for x in one.logs] + effects.logs, key=_at)
        effects.said[:] = sorted([x for one in told for x in one.said] + effects.said, key=_at)
        return effects

    def _told(self) -> _Told:
        told = _Told()
        for stage in sorted(self._parts):
            self._tell(told, stage, self._parts[stage])
        told.logs, told.said = map_tensors(lambda x: full(x).detach(), (told.logs, told.said))
        told.here = [x.device == self.device for x in tensors_in((told.logs, told.said))]
        told.logs, told.said = map_tensors(Tensor.cpu, (told.logs, told.said))
        for x in (*told.logs, *told.said):
            why = refusal(x, torch.device("cpu"))
            if why is not None:
                told.refused.append(
                    f"What a layer gives to {call_of(x)} can't be sent to the other ranks of the pipeline: {why}."
                )
        return _Told(refused=told.refused) if told.refused else told

    def _placed(self, told: _Told) -> Any:
        """What was ``told``, where one device has it."""
        here = iter(told.here)
        return map_tensors(lambda x: x.to(self.device) if next(here) else x, (told.logs, told.said))

    def _tell(self, told: _Told, stage: int, parts: list[Effects]) -> None:
        """Add what the units of ``stage`` have said of all microbatches."""
        if len(parts) == 1:
            told.logs += parts[0].logs
            told.said += parts[0].said
            return
        try:
            told.logs += self._of_batch(stage, [part.logs for part in parts], 0)
            told.said += self._of_batch(stage, [part.said for part in parts], 1)
        except _UnlikeError as error:
            call = str(error) or "self.log(...)"
            told.refused.append(
                f"A layer calls {call} for a microbatch as it does not for another one, or did not when the step was "
                "first run. Write microbatches=1, or let it go by the batch, by attributes of the module or by "
                "trainer.global_step."
            )

    def _of_batch(self, stage: int, parts: Sequence[list[Record]], which: int) -> list[Record]:
        """The logs of ``stage`` for the batch, made of each microbatch's, or, if ``which`` is 1, what loggers get."""
        program, counts = self.ready.program, [part.share for part in self.ready.parts]
        if self.ready.coupled:
            return _whole(parts, lambda values: averaged(values, counts))
        events = program.events[program.starts[stage] : program.end(stage)]
        shares = iter([share for event in events if event.said for share in event.said[which]])
        found = _whole(parts, partial(_put_together, shares))
        if next(shares, None) is not None:
            raise _UnlikeError
        return found


class _UnlikeError(Exception):
    """What microbatches gave can't be put together."""


def _whole(parts: Sequence[list[Record]], join: Callable[[list[Tensor]], Tensor]) -> list[Record]:
    """What units say of a batch, made of what they said of each microbatch; ``join`` is given a tensor of each."""
    most = max(parts, key=len)
    if any(len(part) != len(most) for part in parts):
        raise _UnlikeError(call_of(most[-1]))
    return [_joined(records, join) for records in zip(*parts, strict=True)]


def _joined(records: tuple[Record, ...], join: Callable[[list[Tensor]], Tensor]) -> Record:
    first = records[0]
    if not all(_alike(first, x) for x in records[1:]):
        raise _UnlikeError(call_of(first))
    tensors: Iterator[tuple[Tensor, ...]] = zip(*(tensors_in(vars(x)) for x in records), strict=True)
    try:
        return type(first)(**map_tensors(lambda _: join([*next(tensors)]), vars(first)))
    except _UnlikeError as error:
        raise _UnlikeError(call_of(first)) from error


def _put_together(shares: Iterator[bool], values: list[Tensor]) -> Tensor:
    """A tensor that was said of a batch; the next of ``shares`` tells whether ``values`` are shares of a sum."""
    is_share = next(shares, None)
    if is_share is None:
        raise _UnlikeError
    return joined(values) if is_share or isinstance(values[0], ShardedTensor) else values[0]


def _alike(a: Record, b: Record) -> bool:
    """Whether two records are the same but for their tensors."""
    if a.at != b.at:
        return False
    mine, other = (map_tensors(lambda _: None, vars(x)) for x in (a, b))
    try:
        return bool(mine == other) or repr(mine) == repr(other)  # no number is not itself
    except Exception:  # as of arrays
        return repr(mine) == repr(other)


def _at(record: LogRecord | Said) -> int:
    return record.at


class _ByDepth:
    """Takes what a run of a stage says: within units, and outside."""

    def __init__(self, run: StageRun, own: Recorder | None, within: Recorder | None) -> None:
        self._run, self._own, self._within = run, own, within

    @property
    def _to(self) -> Recorder | None:
        return self._own if self._run.path is None else self._within

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._to is not None:
            self._to.log(name, value, *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._to is not None:
            self._to.print(*args, **kwargs)

    def hear(self, said: Said) -> None:
        to = self._to if isinstance(said, SayingCall) else self._own  # a unit's own text its rank says
        if to is not None:
            to.hear(said)


def _refuse_unforeseen(what: str) -> NoReturn:
    """Nobody waits for ``what`` a unit calls."""
    raise RuntimeError(
        f"{user_line()}: a layer calls {what} here, as nothing told that it would when the step was first run. The "
        "other ranks of the pipeline don't wait for it. Let it go by the batch, by attributes of the module or by "
        "trainer.global_step, or return the value from the layer and log it in the step."
    )
