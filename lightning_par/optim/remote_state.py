"""The state that an optimizer keeps of parameters which other ranks of a pipeline hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.mesh.broadcast import Pickled, kind_of
from lightning_par.mesh.handshake import refuse_alone
from lightning_par.optim.stand_ins import with_inner
from lightning_par.optim.value_places import StagePlaces, mark, unmark
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.tensor import ShardedTensor, full

_DEPTH = 5
_OTHERS = ("torch", "lightning", "pytorch_lightning", "lightning_par", "builtins", "collections")
_NOT_HELD = ("param_groups", "state")


class StatesAway:
    """What an optimizer keeps of parameters that others hold: it needs it in a step, nobody is to see it between.

    Example::

        away = StatesAway()
        away.show(optimizer, stages)
        optimizer.step()  # followed
        away.hide(optimizer)
    """

    def __init__(self) -> None:
        self._states: list[dict[Tensor, Any]] = []  # of the optimizer and those that it wraps
        self._agreed = False

    def show(self, optimizer: Optimizer, stages: StagePlaces) -> None:
        """Put it into ``optimizer``; all ranks must call it."""
        together = with_inner(optimizer)
        for one, states in zip(together, self._states):
            one.state.update(states)
        if not self._agreed:
            for one in together:
                _agree(one, stages)
            self._agreed = True

    def hide(self, optimizer: Optimizer) -> None:
        """Take it out again."""
        self._states = []
        for one in with_inner(optimizer):
            away = [p for p in one.state if isinstance(p, Elsewhere)]
            self._states.append({p: one.state.pop(p) for p in away})


def _agree(optimizer: Any, stages: StagePlaces) -> None:
    """Let all ranks know what those before made of parameters that only they hold. All must call it.

    Afterwards the others have what stands for the state of these, and of what ``optimizer`` keeps in attributes it is
    known where it is.
    """
    refuse_alone(stages.axis, steps_over_stages(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    located = {i: p for i, p in enumerate(parameters) if stages.holders(p) is not None}
    first = {i for i, p in located.items() if stages.holders(p)[0] == stages.axis.rank}  # type: ignore[index]
    mine = {i: _told(optimizer.state[p]) for i, p in located.items() if i in first and p in optimizer.state}
    held = dict(_held(vars(optimizer), (), set()))
    away = {path: x.origin.holders for path, x in held.items() if isinstance(x, Elsewhere)}
    for x in held.values():
        unmark(x)
    for states, places in stages.axis.all_gather_object((mine, away), "optimizer"):
        for path, place in places.items():
            if not isinstance(held.get(path), Elsewhere):
                mark(held.get(path), place)
        for i, state in states.items():
            _stand_for(optimizer.state, located[i], state, stages)


def steps_over_stages(optimizer: Any) -> str:
    """What a run does that steps an ``optimizer`` which is followed over all stages."""
    return f"steps {type(optimizer).__name__}, which is none of torch's that treat each parameter by itself"


def _told(state: Any) -> Any:
    """What others must know of a parameter's state: the kind of what is large, the value of all else."""
    if not isinstance(state, dict):
        return state
    return {name: kind_of(x) if _is_large(x) else Pickled(map_tensors(_plain, x)) for name, x in state.items()}


def _stand_for(states: Any, p: Tensor, told: Any, stages: StagePlaces) -> None:
    if not isinstance(p, Elsewhere):
        for x in states[p].values() if isinstance(states[p], dict) else ():
            map_tensors(unmark, x)
            if _is_large(x):
                mark(x, stages.holders(p))
    elif isinstance(told, dict):
        states[p] = {
            name: x.value if isinstance(x, Pickled) else Elsewhere(x[0], x[1], p.device, replace(p.origin))
            for name, x in told.items()
        }
    else:
        states[p] = told


def _is_large(x: Any) -> bool:
    return isinstance(x, Tensor) and (isinstance(x, ShardedTensor) or x.numel() > 1)


def _plain(x: Tensor) -> Tensor:
    return full(x).detach().clone()


def _held(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in attributes, also within containers and objects of the user's, by where they are."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in seen or len(path) > _DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items = [(key, x) for key, x in value.items() if isinstance(key, (str, int)) and key not in _NOT_HELD]
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif type(value).__module__.partition(".")[0] in _OTHERS or not hasattr(value, "__dict__"):
        return
    else:
        items = list(vars(value).items())
    for i, (_, x) in enumerate(items):
        yield from _held(x, (*path, i), seen)
