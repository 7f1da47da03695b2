"""What ranks tell each other that units and backwards changed: what of it travels, and on what terms."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import broadcast_batch, refusal
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.console import Said
from lightning_par.pipeline.effects.local_objects import ByPlace, stand_in_for
from lightning_par.pipeline.effects.logged_outputs import LogRecord, call_of
from lightning_par.pipeline.run.messages import lost
from lightning_par.private.modes import no_modes
from lightning_par.python_state.changes import Change, MappingChange, stored_by
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.sharded.lost_graphs import refuse_gradient
from lightning_par.sharded.tensor import ShardedTensor, full


@dataclass
class Changed:
    """What one call of a unit changed, or one backward.

    Attributes:
        path: the unit; "" where it is what backward runs.
        shared: by name, of what is reached outside of the unit, too.
        own: by name, of what the unit alone holds.
        graphs: of ``shared`` the names of changes with tensors that have a graph, and which of their tensors.
        logs: what a backward logged by the module.
        said: what it printed by the module, and gave to loggers.
    """

    path: str
    shared: dict[str, Change] = field(default_factory=dict)
    own: dict[str, Change] = field(default_factory=dict)
    graphs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logs: list[LogRecord] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    @classmethod
    def since(cls, before: Snapshot, own: Collection[str], path: str = "") -> Changed:
        """What has changed since ``before``, where ``own`` are the names of what units alone hold."""
        left = before.left()
        shared = {name: change for name, change in left.items() if name not in own}
        return cls(path, shared, {name: change for name, change in left.items() if name in own})

    def with_graphs(self) -> Changed:
        """Itself, with ``graphs``, before it travels."""
        found = {name: _with_graph(change) for name, change in self.shared.items()}
        return replace(self, graphs={name: which for name, which in found.items() if which})

    def refuse_gradients(self) -> None:
        """It has travelled: a gradient for what had a graph on the unit's rank ends the job."""
        for name, which in self.graphs.items():
            tensors = tensors_in(vars(self.shared[name]))
            for n in which:
                if not tensors[n].requires_grad:
                    refuse_gradient(tensors[n], _lost(self.who, name))

    @property
    def any(self) -> bool:
        """Whether it is more than nothing."""
        return bool(self.shared or self.own or self.logs or self.said)

    @property
    def who(self) -> str:
        return f"a hook of {self.path!r} or its own code" if self.path else "a hook on a gradient"


@dataclass
class Told:
    """What a rank tells of a stage: the calls of units by their events, or why it can't, or what was raised there."""

    calls: dict[int, Changed] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    raised: bytes | None = None


def sent(told: Told, axis: Axis, device: torch.device, source: int, purpose: str, known: Known) -> Told:
    """``told`` of index ``source`` along ``axis``, on all its ranks."""
    try:
        came: Told = broadcast_batch(told, axis, device, source, True, purpose, known)
    except RuntimeError as error:
        raise lost(f"Hearing what layers keep from pipeline rank {source}", error) from error
    return came


def leave_what_cannot_travel(told: Told, known: Known, device: torch.device, made: ByPlace) -> None:
    """Take out of ``told`` what can't be sent: what a unit alone holds stays with it, the rest is told as refused.

    Args:
        told: of this rank.
        known: what the ranks name alike; what all of them made themselves is named here, too.
        device: where the process group's tensors live.
        made: see `InnerState`.
    """
    changes = [pair for x in told.calls.values() for pair in (*x.shared.items(), *x.own.items())]
    buffers = (change for name, change in changes if name.endswith("._buffers"))
    known.forget(value for change in buffers for value in stored_by(change).values())
    told.calls = _whole(told.calls, known)
    if refusal(told, device, known) is None:
        return
    _name_what_all_made(told, known, device, made)
    for index, changed in told.calls.items():
        for record in (*changed.logs, *changed.said):
            why = refusal(record, device, known)
            if why is not None:
                told.refused.append(
                    f"What {changed.who} gives to {call_of(record)} can't be sent to the other ranks of the "
                    f"pipeline: {why}."
                )
        whys = {name: refusal(change, device, known) for name, change in changed.shared.items()}
        told.refused += [
            f"What {changed.who} stores in {name} can't be sent to the other ranks of the pipeline: {why}. All of "
            "them need it."
            for name, why in whys.items()
            if why is not None
        ]
        own = {name: _as_far_as_it_can(x, known, device) for name, x in changed.own.items()}
        told.calls[index] = replace(changed, own={name: x for name, x in own.items() if x is not None})
    if told.refused:
        told.calls = {}


def _whole(calls: dict[int, Changed], known: Known) -> dict[int, Changed]:
    """Made whole, what the ranks of this stage have in parts: those of others have no part of it, but where it travels
    in parts. So does what has a graph, which the whole would not have. All of these call it; they go on with their
    parts."""

    def whole(x: Tensor) -> Tensor:
        in_parts = isinstance(x, ShardedTensor) and known.name_of(x) is None
        return full(x).detach() if in_parts and not (x.requires_grad and known.made_of(x)) else x

    with no_modes(), torch.no_grad():
        return map_tensors(whole, calls)  # type: ignore[no-any-return]


def _name_what_all_made(told: Told, known: Known, device: torch.device, made: ByPlace) -> None:
    """What can't travel, and each rank has made for itself, as a library's cache, goes by its name."""
    for name, change in (pair for changed in told.calls.values() for pair in changed.shared.items()):
        for key, value in stored_by(change).items():
            if refusal(value, device, known) is not None:
                place = stand_in_for(value, name, key, made)
                if place is not None:
                    known.names[id(value)] = place


def _as_far_as_it_can(change: Change, known: Known, device: torch.device) -> Change | None:
    """``change`` without what can't travel: what a unit alone holds, as a function, may stay on its rank."""
    if refusal(change, device, known) is None:
        return change
    if not isinstance(change, MappingChange):
        return None
    entries = {key: x for key, x in change.entries.items() if refusal((key, x), device, known) is None}
    return replace(change, entries=entries, order=None)


def _with_graph(change: Change) -> tuple[int, ...]:
    return tuple(n for n, x in enumerate(tensors_in(vars(change))) if x.requires_grad and x.grad_fn is not None)


def _lost(who: str, name: str) -> str:
    return (
        f"The loss goes by what {who} stores in {name}, which it did not when the step was first run. Its gradient "
        "can't get back to the stage of the pipeline that computed it. Return the value from the module's forward, or "
        "use TensorParallelStrategy."
    )
