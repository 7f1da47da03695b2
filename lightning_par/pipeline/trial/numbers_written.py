"""Numbers that a step reads of the model's values, written into a tensor that depends on the batch alone.

Such a tensor is computed once a step, and the same object in all runs of it: what a dry run writes there, by numbers
that it guesses, would stay beside what the run writes that counts, as in a detector's targets, whose rows a matching
names. So each run has a tensor of its own, and makes its own views of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.batch_values import written_by
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import tensors_in

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


@dataclass(frozen=True)
class Memory:
    """Of an event of the batch alone.

    Attributes:
        given: what it takes lies there.
        made: what it returns does.
        written: what it writes does.
    """

    given: frozenset[int]
    made: frozenset[int]
    written: frozenset[int]

    @classmethod
    def of(cls, name: str, args: Any, kwargs: Any, result: Any, is_state: Callable[[Tensor], bool]) -> Memory:
        """Of a call of the function ``name``; each run has copies of the module's tensors as it is."""
        into = [x for x in written_by(name, args, kwargs) if not is_state(x)]
        return cls(memory_in((args, kwargs)), memory_in(result), memory_in(into))


def written_anew(run: Analysis, index: int) -> None:
    """The event ``index`` sees numbers that were read: let each run have its own of what it writes into.

    Raises:
        NoScheduleError: that is a tensor of the batch.
    """
    found = run.values.memory_of_batch.get(index)
    written = frozenset[int]() if found is None else found.written
    if written & memory_in(run.values.kept[0]):
        raise NoScheduleError(
            f"{run.events[index].place}: something is written into the batch by a value of the model, which only one "
            "stage of the pipeline has. Write into a copy: `x = x.clone()`."
        )
    for other, memory in run.values.memory_of_batch.items():
        if not memory.given & written:
            run.events[other].remade |= bool(memory.made & written)
        elif memory.made & written or memory.written & written:  # a view, or another write
            run.events[other].live = True


def memory_in(value: Any) -> frozenset[int]:
    """Where the tensors in ``value`` lie."""
    return frozenset(memory_of(x) for x in tensors_in(value) if x.layout == torch.strided)
