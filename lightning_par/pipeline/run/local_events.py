"""Located events of a stage that is run by its tape, as functions of plain tensors.

In a run of the user's step a function of samples meets its rule (`lightning_par.sharded.rules`) in each microbatch.
Which plain functions that comes to follows from what the key of an event holds: the microbatch's place, the settings,
and of the tensors shapes, strides, dtypes and what autograd does. So the second such event is noted, and from the third
on what was noted runs, as `lightning_par.sharded.local_calls.repeated_calls` does along a mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.program import Key, StepEvent
from lightning_par.pipeline.program.tape import Absent, Call
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.private.graph import made_by
from lightning_par.sharded.functions import DRAWS
from lightning_par.sharded.local_calls.program import program
from lightning_par.sharded.local_calls.tape import Tape, UnclearError
from lightning_par.sharded.tensor import ShardedTensor, remembered

_SETTINGS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
_PLAIN = (Tensor, Parameter)


class Given(NamedTuple):
    """What an event is given, the same in all microbatches of a step.

    Attributes:
        places: of each tensor, in order: which value of the model it is, or the tensor.
        settings: what else it is told, to be a part of a key.
    """

    places: tuple[Key | Tensor, ...]
    settings: tuple[Any, ...]


class LocalEvent(NamedTuple):
    """What an event came to.

    Attributes:
        run: gives the microbatch's own part of the value.
        strides: of the value on one device, where the part does not tell them; see `ShardedTensor`.
        sharded: whether the value has samples, of which this is a part.
    """

    run: Callable[..., Tensor]
    strides: Any
    sharded: bool


def given_to(record: StepEvent, call: Call, memo: BatchValues) -> Given | None:
    """What an event is given, of the step's tape; None where it must be run as ever."""
    if call.nested or record.kind != "located" or getattr(call.func, "__name__", "") in DRAWS:
        return None
    if not isinstance(record.result, Tensor):
        return None
    places: list[Key | Tensor] = []
    settings: list[Any] = [call.func, tuple(call.kwargs)]
    for x in (*call.args, *call.kwargs.values()):
        kind = type(x)
        if kind is Absent:
            places.append(x.key)
            settings.append(Absent)
        elif kind in _PLAIN:
            places.append(x)
            settings.append((kind, memo.keys.get(id(x))))
        elif kind in _SETTINGS:
            settings.append((kind, x or repr(x)))  # 0.0 equals -0.0
        else:
            return None
    return Given(tuple(places), tuple(settings)) if places else None


def facts_of(x: Tensor) -> tuple[Any, ...]:
    """What a rule may go by of a plain tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, made_by(x) is None


def noted(run: StageRun, index: int, record: StepEvent, call: Callable[[], Any], given: list[Tensor]) -> Any:
    """Run an event as ever, by ``call``.

    Args:
        run: whose event it is.
        index: which.
        record: of it.
        call: runs it; its value is in ``run.got`` then.
        given: its tensors, of samples the microbatch's own.

    Returns:
        The `LocalEvent` that does the same; None where there is none.
    """
    names = [f"a{number}" for number in range(len(given))]
    tape = Tape(dict(zip(names, given, strict=True)))
    with tape:
        call()
    result = run.got[index, 0]
    part, strides, sharded = result, None, isinstance(result, ShardedTensor)
    if tape.unclear or not _is_laid_out_as(result, record.result, run.axis):
        return None
    if isinstance(result, ShardedTensor):
        part, strides = result._local, remembered(result)
    if type(part) is not Tensor:
        return None
    try:
        return LocalEvent(program(names, tape.items, tape.described(part)), strides, sharded)
    except UnclearError:
        return None


def _is_laid_out_as(result: Tensor, model: Tensor, axis: MicrobatchAxis | None) -> bool:
    """Whether ``result`` has samples of a microbatch where the step's value ``model`` has those of the batch."""
    if not isinstance(result, ShardedTensor) or not isinstance(model, ShardedTensor):
        return isinstance(result, ShardedTensor) == isinstance(model, ShardedTensor)
    return result._axis is axis and result._dim == model._dim and result._positions is model._positions
