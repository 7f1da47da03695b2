"""Runs of functions in one unit of a recorded step, told apart by kind; those that are alike are folded into one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_par.private.pytree import tree_map
from lightning_par.trial.recording import Event, Recording

if TYPE_CHECKING:
    from lightning_par.planner.recording.recorded import RecordedStep


@dataclass(frozen=True)
class UnitRun:
    """Functions that run one after the other in one unit.

    Attributes:
        path: of the module that a container repeats; "" for what lies between these.
        first: the number of the first event.
        end: the number of the one behind the last.
        kind: which number of run is the first that is like it.
    """

    path: str
    first: int
    end: int
    kind: int


def told_apart(step: RecordedStep, runs: list[tuple[int, int]]) -> tuple[UnitRun, ...]:
    """The runs, from one event to another, each with the first that is like it."""
    kinds: dict[Any, int] = {}
    found = []
    for number, (first, end) in enumerate(runs):
        path = step.homes[first]
        key = (bool(path), step.outlines[first:end]) if path and step.folds else number
        found.append(UnitRun(path, first, end, kinds.setdefault(key, number)))
    return tuple(found)


def outline(event: Event) -> Any:
    """What a function takes and makes, but for the values."""
    return told((event.args, event.kwargs, event.result))


def told(values: Any) -> str:
    """What ``values`` are, but for those of tensors."""

    def one(x: Any) -> Any:
        return (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else str(x)

    return str(tree_map(one, values))


def fold(step: RecordedStep) -> tuple[Recording, dict[int, Tensor]]:
    """The recording with one run of each kind, and what stands in it for a tensor of the step, by its id."""
    stands: dict[int, Tensor] = {}
    kept: list[Event] = []

    def stand(x: Any) -> Any:
        return stands.get(id(x), x) if isinstance(x, Tensor) else x

    for number, run in enumerate(step.runs):
        if run.kind == number:
            for event in step.events[run.first : run.end]:
                args, kwargs, result = tree_map(stand, (event.args, event.kwargs, event.result))
                kept.append(replace(event, args=args, kwargs=kwargs, result=result))
            continue
        like = step.runs[run.kind]
        for a, b in zip(step.events[like.first : like.end], step.events[run.first : run.end], strict=True):
            weights = [(x, y) for x, y in zip(a.inputs, b.inputs) if id(y) in step.names]
            stands.update({id(y): stand(x) for x, y in (*zip(a.outputs, b.outputs), *weights) if x is not y})
    left = {names: x for names, x in step.recording.parameters.items() if id(x) not in stands}
    return replace(step.recording, events=tuple(kept), parameters=left, heard=None), stands
