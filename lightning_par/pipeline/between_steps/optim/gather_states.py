"""States over stages: what the ranks of the pipeline axis hold of them, brought together as one device has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.absent.unread import Unread
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.broadcast import SMALL, Kind, Pickled, kind_of, kinds_at, send_to_all
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full

State = dict[str, Any]
"""What an optimizer keeps of one parameter."""


@dataclass(frozen=True)
class Coming:
    """A tensor that the first rank lacks."""

    source: int
    kind: Kind


def missing_on_first(state: Mapping[str, Any], keep: bool, axis: Axis | None) -> dict[str, Coming]:
    """The entries of a model's state that must travel to the first rank. All ranks must call it.

    Args:
        state: as ``module.state_dict()``, with the same names on all ranks.
        keep: whether this rank needs whole tensors; the first rank's answer counts for all of the axis.
        axis: the pipeline axis, or None.
    """
    if axis is None or axis.size == 1 or not axis.broadcast_object(keep, "state"):
        return {}
    asked: dict[Origin, tuple[str, int]] = {}  # tied parameters come once, by their first name
    for name, x in state.items():
        if isinstance(x, Elsewhere):
            asked.setdefault(x.origin, (name, x.origin.holders[0]))
    wanted: dict[str, int] = axis.broadcast_object(dict(asked.values()), "state")
    kinds = kinds_at(wanted, {name: x for name, x in state.items() if isinstance(x, Tensor)}, axis, "state")
    return {name: Coming(source, kinds[name]) for name, source in wanted.items()}


def whole_where_held(value: Any, keep: bool, axis: Axis) -> Any:
    """``value`` with every tensor in its dicts, lists and tuples whole on the first rank. All ranks must call it.

    Args:
        value: what a checkpoint holds; of the same structure on all ranks.
        keep: whether this rank writes it; the first rank's answer counts for all of the axis.
        axis: the pipeline axis.
    """
    found: dict[str, Tensor] = {}
    _tensors_in(value, "", found)
    coming = missing_on_first(found, keep, axis)
    arrived: dict[Origin, Tensor] = {}
    for path in sorted(coming):
        x = found.get(path, torch.empty(0))  # a path that is not here is another rank's
        there = fetch(x, coming[path], axis)
        if isinstance(x, Elsewhere):
            arrived[x.origin] = there

    def whole(x: Tensor) -> Tensor:
        return arrived.get(x.origin, x) if isinstance(x, Elsewhere) else x

    return map_tensors(whole, value) if keep else value


def _tensors_in(value: Any, path: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Unread):
        return  # it comes as it is written
    if isinstance(value, Tensor):
        found[path] = value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _tensors_in(item, f"{path}/{key}", found)


def fetch(x: Tensor, coming: Coming, axis: Axis) -> Tensor:
    """What is ``coming``, on the first rank; the others get their own ``x`` back, whole on the source."""
    arrived = send_to_all(x, coming.kind, coming.source, axis, "state")
    return arrived.cpu() if axis.rank == 0 else x


def collect(states: Mapping[Any, Any], axis: Axis, keep: bool, everywhere: bool = False) -> dict[Any, Any]:
    """An optimizer's state by parameter id, that of parameters held elsewhere included. All ranks must call it.

    Ids ascend, as where one device's first step made them. What is not by parameter stays this rank's own.

    Args:
        states: this rank's; values may be sharded over another axis, whose ranks must call it, too.
        axis: the pipeline axis.
        keep: whether this rank gets whole tensors; else they are on ``meta`` where others hold parts of them or all.
            The first rank's answer counts for what travels at all.
        everywhere: every rank of the axis gets what it lacks, not the first alone.
    """
    mine = {key: state for key, state in states.items() if isinstance(key, int) and isinstance(state, dict)}
    own = {key: _told(state) for key, state in mine.items() if _is_here(state)}
    told: list[dict[int, State]] = axis.all_gather_object(own, "state")
    travels = everywhere or axis.broadcast_object(keep, "state")
    receivers = range(axis.size if everywhere else 1)
    out: dict[Any, Any] = {}
    for key in sorted({key for theirs in told for key in theirs}):
        source = next(rank for rank, theirs in enumerate(told) if key in theirs)
        goes = travels and any(key not in told[rank] for rank in receivers)
        here = mine[key] if key in own else {}
        out[key] = {
            name: _entry(here.get(name), entry, source if goes else None, axis, keep)
            for name, entry in told[source][key].items()
        }
    return out | {key: state for key, state in states.items() if key not in mine}


def _entry(mine: Any, entry: Any, source: int | None, axis: Axis, keep: bool) -> Any:
    """One value of one parameter's state; a ``source`` means that it travels."""
    if isinstance(entry, Pickled):
        return entry.value if mine is None else mine
    with torch.no_grad():
        whole = full(mine) if mine is not None else None  # always, since ranks of the other axis do it
    if source is not None:
        arrived = RunState.current.handed_on(whole, entry, source, axis, "state", to_cpu=True)
        whole = arrived if mine is None else whole
    if mine is not None and not isinstance(mine, ShardedTensor):
        return mine
    if not keep or whole is None:
        return torch.empty(entry[0], dtype=entry[1], device="meta")
    return whole.cpu()


def _is_here(state: State) -> bool:
    return not any(isinstance(x, Elsewhere) for x in state.values())


def _told(state: State) -> State:
    return {name: _tell(x) for name, x in state.items()}


def _tell(x: Any) -> Any:
    if isinstance(x, Tensor) and (isinstance(x, ShardedTensor) or x.numel() > SMALL):
        return kind_of(x)
    return Pickled.of(x)
