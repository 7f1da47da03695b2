"""What the run of a step that counts did besides computing, on its way to all ranks of the pipeline.

One rank runs the step for real, under `watched_run.Watch.told`. Its `Effects` travel, and every rank, that one
included, applies them: the state of the modules and the trainer's results are then the same everywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import Packed, broadcast_batch, pack, refusal
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.alone import WithoutValues, sent_alone
from lightning_par.pipeline.effects.console import Said, say
from lightning_par.pipeline.effects.local_objects import ByPlace, Made, flat, holds_values, place_of_made, stand_in_for
from lightning_par.pipeline.effects.logged_outputs import LogRecord, MetricReference
from lightning_par.pipeline.effects.unsendable import unsendable
from lightning_par.private.metrics import with_latest
from lightning_par.private.modules import ModuleTree
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.changes import Change, MappingChange, stored_by

if TYPE_CHECKING:
    from lightning_par.pipeline.effects.watched_run import Watch
    from lightning_par.python_state.snapshot import Snapshot

_CPU = torch.device("cpu")
_NOTHING: Any = MappingProxyType({})


@dataclass
class Effects:
    """What one run of a step did.

    Attributes:
        logs: the calls of ``self.log``, in order.
        said: what went to the standard output and to Python's loggers, in order.
        state: what changed, by the name of the object that changed: attributes of modules, of metrics and of plain
            objects, buffers, and the content of containers.
        places: whether an object's entries are its attributes.
        refused: what the step did that can't be told, in words.
        raised: the exception that it ended with, where it did.
        result: the step's return value; the caller sets it.
        names: of objects that all ranks have, by their ids here; and of what stood in for them in the run.
        kept: what the ids are of.
    """

    logs: list[LogRecord] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    state: dict[str, Change] = field(default_factory=dict)
    places: dict[str, bool] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    raised: Exception | bytes | None = None
    result: Any = None
    names: dict[int, str] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def note(self, state: Snapshot) -> None:
        """All that has changed in ``state``, or why it can't be told."""
        for name, change in state.changes().items():
            cell = state.cells[name]
            if cell.fixed is None:
                self.state[name] = change
                self.places[name] = cell.dotted
                continue
            mapping = isinstance(change, MappingChange)
            places = ", ".join(map(cell.place, [*change.entries, *change.deleted])) if mapping else name
            self.refused.append(cell.fixed.format(places=places))
        self.names.update(state.names)
        self.names.update(state.stand_ins())
        self.kept.append((state, [*state.met], [cell.lent for cell in state.cells.values() if cell.lent]))

    def travel(
        self, axis: Axis, source: int, device: torch.device = _CPU, objects: Mapping[str, Any] = _NOTHING,
        made: Made = _NOTHING, module: nn.Module | ModuleTree | None = None, present: Callable[[], Made] = dict,
        within: ByPlace = _NOTHING, absent: Effects | None = None,
    ) -> Effects:  # fmt: skip
        """The effects of index ``source`` along ``axis``, on every rank; tensors lose their graph.

        Args:
            axis: the pipeline axis; all its ranks call this.
            source: whose effects count; what the others pass is dropped.
            device: where the process group's tensors live.
            objects: what all ranks have, by name: it does not travel, each rank goes on with its own.
            made: what this rank stored itself in a run of the same step without any values of the model.
            module: what it is made of does not travel, either; its `ModuleTree`, where it is asked often.
            present: what this rank has where another has made something: it had made that before.
            within: what all ranks made within units when the step was recorded.
            absent: what this rank did itself in that run. In a dry run of another rank than the source these arrive,
                with no values.

        Raises:
            TypeError: the step stored or returned what can't be sent; on every rank, and it names the attribute.
            Exception: what the step raised, on every rank.
        """

        def named(made: Made) -> dict[str, Any]:
            return {place_of_made(*key): x for key, x in made.items()}

        known = Known(self.names, {**objects, **flat(within), **named(made)}, module, lambda: named(present()))
        if axis.dry:
            here = self if axis.rank == source or absent is None else absent
            known = WithoutValues(known, here.names)
            if not here.refused and here.raised is None:
                here._packed(device, known, made, within)
            return self._accepted(sent_alone(here, axis, source, known))
        sent, packed = replace(self, names={}, kept=[]), None
        if axis.rank == source and not self.refused and self.raised is None:
            packed = self._packed(device, known, made, within)
        sent = Effects(refused=self.refused) if self.refused else sent
        sent = Effects(raised=packed_error(self.raised)) if isinstance(self.raised, Exception) else sent
        arrived: Effects = broadcast_batch(sent, axis, device, source, True, "effects", known, packed)
        return self._accepted(arrived)

    def _packed(self, device: torch.device, known: Known, made: Made, within: ByPlace) -> Packed | None:
        """As it is sent; None where something of it can't be, which is `refused`, or stays, as all have made theirs."""
        sent = replace(self, names={}, kept=[])
        packed = pack(sent, device, True, known)
        if not isinstance(packed.header, str):
            return packed
        for place, value in self._left_behind(device, known, made, within):
            known.add(place, value)
        self.refused.extend(sent._unsendable(device, known))
        return None

    def _accepted(self, arrived: Effects) -> Effects:
        """What has ``arrived``; raises what the step did that can't be told, or what it raised itself."""
        if arrived.refused:
            raise TypeError(" ".join(arrived.refused))
        if arrived.raised is not None and isinstance(self.raised, Exception):
            raise self.raised  # where it was raised it has its traceback
        if isinstance(arrived.raised, bytes):
            raise pickle.loads(arrived.raised)
        return arrived

    def _left_behind(self, device: torch.device, known: Known, made: Made, within: ByPlace) -> list[tuple[str, Any]]:
        """What can't travel and has nothing of the model's values in it: each rank has made it for itself."""
        found = []
        for name, change in self.state.items():
            for key, value in stored_by(change).items():
                if refusal(value, device, known) is None:
                    continue
                twin = made.get((name, key))
                alike = twin is not None and type(twin) is type(value) and not holds_values(twin, self.names)
                place = place_of_made(name, key) if alike else stand_in_for(value, name, key, within)
                if place is not None:
                    found.append((place, value))
        return found

    def _unsendable(self, device: torch.device, known: Known) -> list[str]:
        """What can't travel, in words; the parts are tried one by one only if the whole can't."""
        if refusal(self, device, known) is None:
            return []
        reasons = [(place, part, refusal(part, device, known)) for place, part in self._parts()]
        return [unsendable(place, part, reason) for place, part, reason in reasons if reason is not None]

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for record in self.logs:
            yield f"What self.log({record.name!r}, ...) got", record
        for name, change in self.state.items():
            if not isinstance(change, MappingChange):
                yield f"What the step stored in {name}", change
                continue
            for key, value in change.entries.items():
                yield f"{name}.{key}" if self.places[name] else f"{name}[{key!r}]", (key, value)
            yield name, (change.inplace, change.deleted, change.order)
        for said in self.said:
            yield "What the step gives to a logger", said
        yield "What the step returns", self.result


def packed_error(error: Exception) -> bytes:
    """An exception as others can raise it, in other words where its class can't be sent."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # some can be written and not be read
    except Exception:  # the class may want anything to be made
        packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


def apply(effects: Effects, lightning_module: Any, watch: Watch, batch: Any, show: bool) -> None:
    """Do what the run that counts did: change the state, log, print.

    Args:
        effects: the same on all ranks; see `Effects.travel`.
        lightning_module: whose step it was. Its ``log`` is called for real, so the trainer's hook is to be on.
        watch: of the same modules on every rank, in the state before the run.
        batch: what the step was given.
        show: whether this rank prints.

    Raises:
        RuntimeError: another object has changed than this rank has.
    """
    snapshot = watch.snapshot()
    cells = watch.cells(batch) if effects.state else {}
    for name, change in effects.state.items():
        if name not in cells:
            raise RuntimeError(f"The step changes {name}, which is not there on every rank of the pipeline.")
        cells[name].apply(change)
    watch.settle(effects.state)
    log_and_say(effects.logs, effects.said if show else (), lightning_module, snapshot.cells)


def log_and_say(
    logs: Iterable[LogRecord], said: Iterable[Said], module: Any, cells: Mapping[str, Cell] = _NOTHING
) -> None:
    """Log and say for real what was recorded of ``module``; ``cells`` may have metrics by name."""
    for record in logs:
        _log(record, module, cells)
    for one in said:
        say(one, module)


def _log(record: LogRecord, module: Any, cells: Mapping[str, Cell]) -> None:
    if not isinstance(record.value, MetricReference):
        module.log(record.name, record.value, *record.args, **record.kwargs)
        return
    cell = cells.get(record.value.name)
    metric = module.get_submodule(record.value.name.removeprefix("self.")) if cell is None else cell.owner
    with with_latest(metric, record.value.cache):
        module.log(record.name, metric, *record.args, **record.kwargs)
