"""A run of the user's step as one stage, on one microbatch, or as the tail, on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.after_decision import AfterDecision
from lightning_par.pipeline.effects.console import hushed, speaking
from lightning_par.pipeline.effects.one_device_draws import stage_draws
from lightning_par.pipeline.effects.random_draws import GlobalDrawError, is_standing, standing
from lightning_par.pipeline.effects.unit_python_state import InnerState
from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.event_functions import is_setting, sets_requires_grad
from lightning_par.pipeline.program.microbatch_values import of_microbatch, written_into
from lightning_par.pipeline.program.program import Key, Program, StepEvent
from lightning_par.pipeline.program.regions import runs_as_one
from lightning_par.pipeline.run.errors import OtherStageError, StageDoneError
from lightning_par.pipeline.run.handed_out import expecting
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.pipeline.run.stage_values import StageValues
from lightning_par.private.compiler import as_compiled
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.registered_hooks import HooksCell
from lightning_par.sharded.functions import writes_into
from lightning_par.sharded.rules.lookup import user_line


class StageRun(StageValues):
    """One stage of the step, on one microbatch; or the tail, on the whole batch.

    Args:
        program: of the step.
        memo: of the batch.
        stage: which stage; ``program.stages`` for the tail.
        axis: the microbatch, None where the batch is not cut.
        receive: gives a value that comes from another stage.
        tells: whether what the step does to metrics counts.
        key: of the random draws.
        stops: whether the last stage ends behind the last unit.

    Attributes:
        told: what units change is told through it, if it is.
        keeps: whether all that a unit changes is told; None where nothing of the run is kept.
        not_kept: is around a unit, whose changes are not told, if any are.
        hooks: those that hung when the run began.
        module: whose step it is.
        residual: whether the ranks of a stage share out the tokens of its residual stream.
        hushed: whether what units print is dropped, or None where the run that is on hears it.
        decided: looks at what the step sets behind the last unit, if it may go by values of the model there.
        failed: where a check between units met what the other stages don't go by, so that it must raise.
    """

    told: InnerState | None = None
    keeps: Callable[[str | None], bool] | None = None
    not_kept: Callable[[str], AbstractContextManager[None]] | None = None
    hushed: bool | None = None
    hooks: HooksCell | None = None
    module: nn.Module | None = None
    residual = False
    decided: AfterDecision | None = None
    failed: str | None = None

    def __init__(
        self,
        program: Program,
        memo: BatchValues,
        stage: int,
        axis: MicrobatchAxis | None,
        receive: Callable[[Key], Tensor],
        tells: bool,
        key: Sequence[int],
        stops: bool = False,
    ) -> None:
        super().__init__(program, memo, stage, axis, receive)
        self.tells = tells
        self.draws = stage_draws(key, program, memo, axis)
        tail = stage == program.stages
        self.first = program.tail if tail else program.starts[stage]
        self.end = len(program.events) + 1 if tail else program.end(stage)
        self.last = stage >= program.stages - 1 and not stops
        if stops:
            self.end = program.tail
        self.alone = axis is None or axis.rank == 0
        self.begin_anew()
        self.again: Callable[[Callable[[], Any]], Any] | None = None  # makes a call that backward runs again
        self.lost = False  # behind the last unit a value read may have led elsewhere than in the analysis

    def begin_anew(self) -> None:
        """Nothing has run so far, or what has is forgotten."""
        self.count, self.failed = 0, None
        self.checked = min(self.end, self.program.tail) if self.alone else -1  # behind the last unit of the stage
        self.ran: list[str] = []
        self.got, self.names = {}, {}

    def _next(self, func: Any) -> tuple[int, StepEvent | None]:
        self._refuse_goes_on()
        index, self.count = self.count, self.count + 1
        if index == self.checked:
            self._check_draws()
        if self.decided is not None and index >= self.program.tail:
            self.decided.begin()
        if index >= self.end and not self.last:
            raise StageDoneError
        record = self.program.events[index] if index < len(self.program.events) else None
        if not self.lost and (record is None or record.func != func):
            if index < self.program.tail or not self.last:
                raise self._changed()
            self.lost = True  # no stage follows that would have to do the same
        return index, None if self.lost else record

    def finish(self) -> None:
        """The step has come to its end."""
        self._refuse_goes_on()
        if self.checked >= 0:
            self._check_draws()
        if self.decided is not None:
            self.decided.refuse()

    def _refuse_goes_on(self) -> None:
        """Raises OtherStageError where a check between units has failed, and the step goes on."""
        if self.failed is not None:
            raise OtherStageError(
                f"{self.failed}: the step decides by a value of the model here, raised by the other answer when it was "
                "first run, and goes on this time: the stages that don't have the value can't know of it. Choose by "
                "torch.where, move this into a module's forward, or use TensorParallelStrategy."
            )

    def sets(self, func: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and sets_requires_grad(func, args, kwargs):  # a dry run did not
            raise OtherStageError(
                f"{user_line()}: after a decision by a value of the model, such as the loss, the step changes whether "
                "a parameter requires a gradient: the other ranks of the pipeline can't know of it. Do so in "
                "on_train_batch_end, where all ranks have the loss, or use TensorParallelStrategy."
            )

    def _check_draws(self) -> None:
        """The units of a stage must have left numpy's and Python's global generators alone."""
        self.checked = -1
        if self.ran and self.memo.standing is not None and not is_standing(self.memo.standing):
            raise GlobalDrawError(*self.ran)

    def _changed(self) -> OtherStageError:
        return OtherStageError(
            f"{user_line()}: this time the step did something else here than when it began, so that its stages "
            "can't go on together. What it does must depend on the batch, the module's attributes and random "
            "numbers of torch, numpy or `random` alone."
        )

    def is_of_step(self, x: Tensor) -> bool:
        return not self.memo.is_state(x)

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.failed is not None:  # its message may tell values, those of the microbatch's samples
            given = map_tensors(of_microbatch, (self.present(args), self.present(kwargs)))
            return func(*given[0], **given[1])
        if not self.lost and self.may_be_setting(func, args, kwargs):
            result = func(*args, **kwargs)
            if is_setting((args, kwargs), result):
                return result
            if self.count < self.program.tail or not self.last:
                raise self._changed()
            self.lost = True
            self._check_here((args, kwargs))
            return result
        index, record = self._next(func)
        if record is None:
            self._check_here((args, kwargs))
            return func(*self.present(args), **self.present(kwargs))
        if record.live and record.kind == "batch":
            return self.memo.keep(index, func(*args, **kwargs))
        if record.kind == "batch":
            # computed once a step, whichever stages and microbatches run here
            again = self.memo.anew_for if record.remade else self.memo.again
            result = again(index, func, args, kwargs)
            self.note_alias(func, args, result)
            return result
        if record.kind == "update":  # done apart
            return self.from_apart(args, kwargs, record)
        written = writes_into(getattr(func, "__name__", "")) or "out" in kwargs
        if record.itself is not None and (index < self.first or not written):
            return tensors_in((args, kwargs))[record.itself]
        if index < self.first:
            value = self.from_before(index, record)
            return self._returned(func, args, value, record)
        if record.kind == "read" and self.axis is not None and index not in self.program.guards:
            return record.result  # no one knows the whole batch's number here; the tail will
        # draws go by the place in the step, so that they are the same whatever runs on this rank
        with self.draws.of(index, func, kwargs):
            given, kwargs = self.scaled(self.inputs(args, record.cuts), record), self.inputs(kwargs, record.cuts)
            if record.writes:
                given = (given[0].clone(), *given[1:])  # the batch's own tensor serves the other microbatches, too
            result = func(*given, **kwargs)
            result = result.clone() if record.copies else result
            self._check_claim(index, record, result)
            if index in self.program.guards and result != record.result:
                self.failed = record.place
        result = given[0] if record.writes or record.sets else result
        return self._returned(func, args, self.made(index, result, record), record)

    def _check_here(self, given: Any) -> None:
        """Raises OtherStageError where behind a decision a function is ``given`` what is not this rank's alone."""
        if self.module is None or not self.program.elsewhere:
            return
        held = (*self.module.named_parameters(), *self.module.named_buffers())
        elsewhere = {id(x): name for name, x in held if name in self.program.elsewhere}
        name = next((elsewhere[id(x)] for x in tensors_in(given) if id(x) in elsewhere), None)
        if name is not None:
            raise OtherStageError(
                f"{user_line()}: after a decision by a value of the model, such as the loss, the step uses {name!r}, "
                "which another stage has that can't know of it. Do so in on_train_batch_end, where all ranks see all "
                "weights and buffers, or use TensorParallelStrategy."
            )

    def _check_claim(self, index: int, record: StepEvent, result: Any) -> None:
        """Raises ValueError where a result is larger than the user's code says, and later stages go by that."""
        if record.claimed and index < self.program.starts[-1] and result.shape != record.result.shape:
            kinds = len(record.result)
            raise ValueError(
                f"{record.place}: `bincount` met the value {len(result) - 1}, though minlength={kinds} says "
                f"that there are {kinds} kinds, and modules of a later stage of the pipeline go by that. "
                "Give it a larger minlength, move it into the forward of a module, or use TensorParallelStrategy."
            )

    def _returned(self, func: Any, args: Any, value: Any, record: StepEvent) -> Any:
        if record.writes:
            return written_into(self, args[0], value, func)
        if self.written and writes_into(getattr(func, "__name__", "")):  # on an earlier stage it is another object now
            followed = {key: (target, value) for key, (target, x) in self.written.items() if x is args[0]}
            self.written.update(followed)
        return None if record.sets else value

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        index, record = self._next(path)
        if record is None:
            raise OtherStageError(
                f"{user_line()}: {path!r} is called where it was not when the step was recorded, as after a decision "
                "by a value of the model, such as the loss: the stages that don't have the value can't know of it. "
                "Call it in any case and choose by torch.where, or use TensorParallelStrategy."
            )
        if index < self.first:
            if self.told is not None:
                self.told.passed(index)
            return self.from_before(index, record)
        args, kwargs = self.all_taken(args, record.viewed), self.all_taken(kwargs, record.viewed)
        self.ran.append(path)
        with (
            self.draws.of(index, module), self.aside(), as_compiled(),
            self._heard(), self._keeping(index, path),
        ):  # fmt: skip
            call = partial(expecting(original, record.result), *args, **kwargs)
            before = standing() if self.memo.standing is None else None
            result = call() if self.again is None else self.again(call)
            if before is not None and not is_standing(before):
                raise GlobalDrawError(path)
        return self.made(index, self.as_recorded(path, result, record), record)

    def _heard(self) -> AbstractContextManager[None]:
        """What a unit prints inside is heard on this rank, once for all microbatches, or by the run that is on."""
        return nullcontext() if self.hushed is None else hushed() if self.hushed else speaking()

    @contextmanager
    def _keeping(self, index: int, path: str) -> Iterator[None]:
        hung = nullcontext() if self.hooks is None else self.hooks.within_unit(path, self.axis is not None)
        kept = nullcontext() if self.not_kept is None else self.not_kept(path)
        with hung, kept, nullcontext() if self.told is None else self.told.call(index, path):
            yield

    @contextmanager
    def region(self, by_itself: Callable[[Callable[[], Any]], Any]) -> Iterator[bool]:
        first, end = self.count, self.program.regions.get(self.count)
        self.draws.at(first)
        in_parts = self.axis is not None and self.residual
        if end is None or runs_as_one((first, end), (self.first, self.end), self._see_batch(first, end), in_parts):
            yield True
            return
        before, self.again = self.again, by_itself  # in backward there are no values of other stages
        try:
            yield False
        finally:
            self.again = before

    def _see_batch(self, first: int, end: int) -> Iterator[bool]:
        """Whether events are given a part of what depends on the batch alone: backward would run them on all of it."""
        events = self.program.events[first:end] if self.program.microbatches > 1 else ()
        return (event.kind == "batch" or event.cuts or bool(event.given) for event in events)

    def metric_within(self, metric: nn.Module) -> None:
        if self.keeps is not None and not self.keeps(self.path):
            raise RuntimeError(
                f"{user_line()}: a layer calls a {type(metric).__name__} here, as nothing told that it would when the "
                "step was first run. The other ranks of the pipeline would not have its state. Call it in the step."
            )

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        record = self._next(("metric", method))[1]
        if not self.tells and record is not None:  # only the run that counts may update it
            return map_tensors(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device), record.result)
        return original(*self.present(args), **self.present(kwargs))
