"""The values of a step's model in a run of one stage: received from other stages, given to units, made, and left."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.microbatch_values import cut_to, local_shape, of_microbatch, share_of, shown_as
from lightning_par.pipeline.program.program import Key, Program, StepEvent, is_located
from lightning_par.pipeline.run.errors import OtherStageError
from lightning_par.pipeline.run.located import RecordedRun
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.python_state.nested_tensors import map_returned, map_tensors, returned_tensors, tensors_in, twin
from lightning_par.python_state.tensor_classes import plain
from lightning_par.python_state.tensor_writes import set_to
from lightning_par.sequence.staged_tokens import Tokens
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor


class StageValues(RecordedRun):
    """A run that knows the values of one stage on one microbatch; `StageRun` says what its events do with them.

    Args:
        program: of the step.
        memo: of the batch.
        stage: which stage; ``program.stages`` for the tail.
        axis: the microbatch, None where the batch is not cut.
        receive: gives a value that comes from another stage.

    Attributes:
        got: the values that are here.
        names: the values that absent tensors, by id, stand for.
    """

    tokens = Tokens()
    """How sequences lie on the ranks of this stage."""

    def __init__(
        self,
        program: Program,
        memo: BatchValues,
        stage: int,
        axis: MicrobatchAxis | None,
        receive: Callable[[Key], Tensor],
    ) -> None:
        super().__init__(program)
        self.memo, self.stage, self.axis, self.receive = memo, stage, axis, receive
        tail, routes = stage == program.stages, program.routes
        self.coming: Collection[Key] = routes.tail if tail else routes.keys_coming[stage]
        self.leaving = () if tail else tuple(routes.leaving[stage])
        self.got: dict[Key, Tensor] = {}
        self.names: dict[int, Key] = {}

    def copied(self, x: Tensor) -> Tensor:
        copy = self.memo.copied(x)
        return super().copied(x) if copy is None else copy

    def write_back(self) -> None:
        """Values of the model that the step wrote into tensors of the module get there."""
        with torch.no_grad():
            for target, value in self.written_tensors():
                if self.memo.is_state(target):
                    set_to(target, value)
                    self.memo.note_write(target)

    def outputs(self) -> dict[Key, Tensor]:
        """What other stages need, after the run."""
        return {key: self.got[key] for key in self.leaving}

    def from_before(self, index: int, record: StepEvent) -> Any:
        """A value from before this stage: received where it is needed, else absent."""
        if record.kind == "read":
            return record.result
        numbers = iter(range(len(returned_tensors(record.result))))

        def value(absent: Tensor) -> Tensor:
            key = (index, next(numbers))
            if not is_located(absent):  # sizes that the batch alone tells are what they were
                return absent
            self.names[id(absent)] = key
            if key not in self.coming:
                return absent
            self.got[key] = self.receive(key)
            return self.got[key]

        return map_returned(value, twin(record.result))

    def from_apart(self, args: Any, kwargs: Any, record: StepEvent) -> Any:
        """What stands for a value that is made of weights alone, which no stage takes."""
        if record.itself is not None:
            return tensors_in((args, kwargs))[record.itself]
        return None if record.sets else twin(record.result)

    def present(self, value: Any) -> Any:
        """``value`` with what has been received in place of absent tensors."""
        return map_tensors(self._found, value) if self.names else value

    def _found(self, x: Tensor) -> Tensor:
        key = self.names.get(id(x))
        if key is None:
            return x
        if key not in self.got:
            raise OtherStageError(
                f"{user_line()}: the step uses a value here that was computed on an earlier stage and was not used "
                "here when the step was recorded. Which values a step uses must not depend on values that it reads."
            )
        return self.got[key]

    def inputs(self, value: Any, cuts: bool) -> Any:
        """``value`` as a located event takes it: absent tensors found, whole samples cut to the microbatch."""
        value = self.present(value)
        if self.axis is None:
            return value
        value = map_tensors(self._cut, value) if cuts else value
        return map_tensors(plain, value) if self.memo.classes else value

    def _cut(self, x: Tensor) -> Tensor:
        layout = self.program.layouts.get(self.memo.keys.get(id(x), (-2, 0)))
        return x if layout is None or self.axis is None else cut_to(x, layout, self.axis)

    def all_taken(self, value: Any, viewed: bool) -> Any:
        """``value`` as a unit takes it: as an event does, but in plain tensors where it does the same on them."""
        return map_tensors(lambda x: self.taken(x, viewed), value) if value else value

    def taken(self, x: Tensor, viewed: bool) -> Tensor:
        """``x`` as a unit takes it."""
        x = self._cut(self._found(x))
        if viewed and isinstance(x, ShardedTensor) and x.axis is self.axis:
            return shown_as(x, x.with_local(self.tokens.entered(x.local)))
        return self.tokens.entered(of_microbatch(x))

    def scaled(self, args: Any, record: StepEvent) -> Any:
        """``args`` with what is no share, in sums with shares, scaled to the microbatch's share."""
        if not record.shares or self.axis is None:
            return args
        share = share_of(self.program, self.axis)
        items: list[Any] = list(args)
        for place in record.shares:
            items[place] = items[place] * share
        return tuple(items)

    def as_recorded(self, path: str, result: Any, record: StepEvent) -> Any:
        """A unit's result as the step sees it: samples of a microbatch stand for the whole batch's."""
        if self.axis is None:
            return result
        axis = self.axis
        recorded = iter(returned_tensors(record.result))

        def wrap(x: Tensor) -> Tensor:
            model = next(recorded, None)
            if not isinstance(model, ShardedTensor) or record.viewed and isinstance(x, ShardedTensor):
                return x
            expected = local_shape(model, axis)
            if tuple(x.shape) != expected:
                raise OtherStageError(f"{path!r} returned {tuple(x.shape)} where {expected} was expected.")
            return ShardedTensor(x, model.sharded_dim, model.positions, axis)

        return map_returned(wrap, result)

    def made(self, index: int, result: Any, record: StepEvent) -> Any:
        """``result``, which event ``index`` made here."""
        for n, x in enumerate(returned_tensors(result)):
            self.got[index, n] = x
        if self.names:  # user code may still hold the absent tensor that was written into
            self.names.update((id(x), (index, n)) for n, x in enumerate(returned_tensors(record.result)))
        return result
