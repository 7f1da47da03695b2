"""A run of a step without any stage's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.program.batch_values import BatchValues, has_graph
from lightning_par.pipeline.program.event_draws import standing
from lightning_par.pipeline.program.event_functions import is_setting, sets_requires_grad
from lightning_par.pipeline.program.joined_outputs import unjoined
from lightning_par.pipeline.program.microbatch_values import written_into
from lightning_par.pipeline.program.program import Key, Program, StepEvent
from lightning_par.pipeline.program.tape import Tape
from lightning_par.pipeline.program.update_calls import UpdateCalls
from lightning_par.pipeline.run.located import RecordedRun
from lightning_par.pipeline.trial.call_context import content_of, flags_of, modes_around, told_to
from lightning_par.pipeline.trial.deciding_numbers import answers
from lightning_par.pipeline.trial.result_sizes import sizing
from lightning_par.private.modes import innermost_mode
from lightning_par.python_state.nested_tensors import tensors_in, twin
from lightning_par.python_state.referents import all_tensors_in
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.trial.step import loss_in


class ChangedError(Exception):
    """The step did something else than what was recorded of it."""


class DryRun(RecordedRun):
    """Computes what depends on the batch alone, and checks that the step does what was recorded of it.

    Raises:
        ChangedError: it does something else.
    """

    def __init__(self, program: Program, memo: BatchValues, module: nn.Module, tape: Tape | None = None) -> None:
        super().__init__(program)
        self.memo = memo
        self.names: dict[int, Key] = {}  # of absent tensors
        self.tape = tape  # notes what it meets
        self.updates = UpdateCalls(module, program, self.names)
        self._regions: set[int] = set()  # those that it has come to

    def __enter__(self) -> Any:
        if self.tape is not None:
            self.tape.begin(self.names)
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "" if self.depth else getattr(func, "__name__", "")
        if name in ("__set__", "requires_grad_") and torch.is_grad_enabled() and sets_requires_grad(func, args, kwargs):
            raise ChangedError(f"{user_line()}: which parameters require a gradient")  # a trial then refuses it
        if self.tape is not None and name == "__set__":
            self.tape.spoil()  # `x.requires_grad = True` is no event
        return super().__torch_function__(func, types, args, kwargs)

    def _next(self, func: Any, args: Any, kwargs: Any) -> tuple[int, StepEvent]:
        program, names, index = self.program, self.names, self.count
        self.count = index + 1
        if index >= len(program.events) or program.events[index].func != func:
            raise ChangedError(f"{user_line()}: {func}")
        record = program.events[index]
        if record.sizing is not None and index < program.tail and sizing(func, args) != record.sizing:
            raise ChangedError(f"{user_line()}: how many values {func} is to return")
        tensors = tensors_in((args, kwargs))
        inputs = tuple([names[key] for key in map(id, tensors) if key in names])
        if inputs != record.inputs[: len(record.inputs) - record.handed]:
            raise ChangedError(f"{user_line()}: the inputs of {func}")
        # by them, and by the flags that a unit is told, go the gradients, of a whole batch, too
        if record.around and modes_around() != record.around:
            raise ChangedError(f"{user_line()}: whether {func} keeps gradients, or which dtype autocast gives it")
        if record.kind == "located" and (program.microbatches > 1 or isinstance(func, str)):
            told = self._told(func, args, kwargs, record, tensors)
            record.told = told if record.told is None else record.told
            if record.told != told:
                raise ChangedError(f"{user_line()}: what {func} is told")
        if record.kind == "update":
            if self.updates.weights_in(tensors) != record.told:
                raise ChangedError(f"{user_line()}: which weights {func} is given")
            self.updates.note(index, record, func, args, kwargs)
        # A crop of the step's own changes the shapes that cross; behind the last module nothing crosses any more.
        if record.given and index < program.tail:
            if tuple(tuple(x.shape) for x in tensors if id(x) in self.memo.keys) != record.given:
                raise ChangedError(f"{user_line()}: the shapes that {func} is given")
        if self.tape is not None:
            self.tape.note(index, record, func, args, kwargs)
        if index in program.regions:
            self.memo.regions[index] = standing()
        if record.drawn:
            self.memo.draw(index, record.drawn)
        if record.kind in ("located", "update") and record.itself is None:
            for n, (key, located) in enumerate(record.returned):
                (names if located else self.memo.keys)[key] = (index, n)
        return index, record

    def _told(self, func: Any, args: Any, kwargs: Any, record: StepEvent, tensors: list[Tensor]) -> tuple[Any, ...]:
        """What an event is told beside tensors, so far as another program may follow from it."""
        cut = self.program.microbatches > 1
        content = content_of(self._without_samples(tensors)) if record.by_content and cut else ()
        told = told_to(func, args, kwargs, self.names, record.by_numbers) + content
        # units may go by what others leave from now on
        told = told if cut or self.program.leaves else flags_of(told)
        return (*told, *answers(record.asked, args, kwargs)) if record.asked else told

    def _without_samples(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of the batch alone that are the same for all samples."""
        there = [x for x in tensors if id(x) not in self.names]
        return [x for x in there if self.memo.keys.get(id(x)) not in self.program.layouts]

    def is_of_step(self, x: Tensor) -> bool:
        return not self.memo.is_state(x)

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.may_be_setting(func, args, kwargs):
            result = func(*args, **kwargs)
            if is_setting((args, kwargs), result):
                if self.tape is not None:
                    self.tape.spoil()
                return result
            raise ChangedError(f"{user_line()}: {func}")
        index, record = self._next(func, args, kwargs)
        if record.kind == "batch":
            compute = self.memo.anew_for if record.remade else self.memo.compute
            result = compute(index, func, args, kwargs)
            if any(map(has_graph, tensors_in(result))) and not record.graphed:
                raise ChangedError(f"{user_line()}: a gradient goes to what it takes now")
            self.note_alias(func, args, result)
            return result
        if record.itself is not None:
            return tensors_in((args, kwargs))[record.itself]
        if record.writes:
            return written_into(self, args[0], record.result, func)
        return None if record.sets else twin(record.result)

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        index, record = self._next(path, args, kwargs)
        if self.tape is not None:
            self.tape.note_unit(index, path, module, original, alone=innermost_mode() is self)
        return twin(record.result)

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._next(("metric", method), args, kwargs)[1].result

    def see_loss(self, result: Any) -> None:
        """The step has returned ``result``: gradients come from the loss in it.

        Raises:
            ChangedError: it is another value of the model than in the program, or there is none, or there was none.
        """
        losses = loss_in(result), loss_in(self.program.result)
        mine, known = ((x is None, self.names.get(id(x))) for x in losses)
        if mine != known:
            raise ChangedError("which loss it returns")

    def see_joined(self, values: Iterable[Any], printed: Iterable[Any]) -> None:
        """The step logs, returns and stores these ``values``, and prints others.

        Raises:
            ChangedError: there are some among them that microbatches have no part of.
        """
        names, is_state = self.names, self.memo.is_state
        key = unjoined(values, names, self.program.joins, is_state) or unjoined(printed, names, frozenset(), is_state)
        if key is not None:
            raise ChangedError(f"{self._place(key)}, which is logged, returned or stored now")

    def lacking(self, values: Any, joined: bool, known: Collection[int]) -> set[Key]:
        """Values of the model that the last stage does not have.

        Args:
            values: all that the step logs, returns, stores and prints.
            joined: whether those of microbatches are put together.
            known: ids of objects that were there before.
        """
        told = (self.names.get(id(x)) for x in all_tensors_in(values, known))
        return {key for key in told if key is not None and not self.program.is_at_end(key, joined)}

    def refuse_lacking(self, lacking: set[Key]) -> None:
        """Raises ChangedError if there are values that the last stage does not have."""
        if lacking:
            raise ChangedError(f"{self._place(min(lacking))}, which is logged, returned or stored now")

    def _place(self, key: Key) -> str:
        return self.program.events[key[0]].place if key[0] >= 0 else "a buffer"

    @contextmanager
    def region(self, by_itself: Callable[[Callable[[], Any]], Any]) -> Iterator[bool]:
        first, known = self.count, self.program.regions
        self._regions.add(first)
        yield True
        if known.get(first) != self.count:
            raise ChangedError(f"{user_line()}: what is computed again in backward")

    def finish(self) -> None:
        if self.count != len(self.program.events):
            raise ChangedError("the step ended early")
        if self._regions != self.program.regions.keys():
            raise ChangedError("what is computed again in backward")
