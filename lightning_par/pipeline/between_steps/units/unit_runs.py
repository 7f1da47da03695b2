"""A unit's code that runs where its weights are, outside of a step; what it makes and does comes to all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import broadcast_batch, refusal
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.between_steps.graphs.unit_graph import UnitGraph, in_graph, innermost
from lightning_par.pipeline.between_steps.units.given_objects import Done, Given
from lightning_par.pipeline.between_steps.units.unit_changes import Left, UnitChanges
from lightning_par.pipeline.between_steps.units.unit_inputs import UnitInputs
from lightning_par.pipeline.effects.console import Said
from lightning_par.pipeline.effects.effects import log_and_say
from lightning_par.pipeline.effects.logged_outputs import LayersHeard, LogRecord, OutputRecorder
from lightning_par.private.graph import preserve_version
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_returned, map_tensors, returned_tensors, tensors_in

Link = Callable[[UnitGraph, Sequence[Tensor]], list[Tensor]]
"""Given the graph of a run, and on the rank where it ran its tensors there: the tensors, as all ranks have them."""


@dataclass
class _Told:
    """What a run did, on its way to the ranks that did not run it."""

    result: Any = None
    graph: UnitGraph | None = None
    done: Done = field(default_factory=Done)
    left: Left | None = None
    drawn: bytes | None = None
    logs: list[LogRecord] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    failure: Exception | None = None


class UnitRuns:
    """Runs units' code on some ranks, and lets all have what it makes and does.

    Args:
        module: of which the units are.
        axis: the pipeline axis.
        device: of this rank.
        within: the modules in units, with their names by id.
        packages: installed packages that count as the user's.
        sharding: the axes along which tensors may be sharded.
        inside: entered around what runs.

    Example::

        runs = UnitRuns(module, axis, device, {}, frozenset(), (), contextlib.nullcontext)
        y = runs("layers.0", layer, (0,), Given("layers.0", (x,)), lambda: layer(x))
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        device: torch.device,
        within: Mapping[int, str],
        packages: frozenset[str],
        sharding: tuple[Axis, ...],
        inside: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._module, self._axis, self._device = module, axis, device
        self._within, self._packages, self._sharding, self._inside = within, packages, sharding, inside

    def __call__(
        self,
        path: str,
        unit: nn.Module,
        holders: Sequence[int],
        given: Given,
        run: Callable[[], Any],
        inputs: UnitInputs | None = None,
        link: Link | None = None,
    ) -> Any:
        """What ``run`` returns, on all ranks, which must call it.

        Args:
            path: the unit.
            unit: itself.
            holders: the ranks that run it; the first one tells.
            given: what it is given.
            run: does it.
            inputs: what its results may have been made of, where they may have a graph.
            link: makes that graph of all ranks.
        """
        changes = UnitChanges(path, unit, self._within, self._packages)
        known, told = given.known(self._sharding, late=changes.objects), _Told()
        if inputs is not None:
            inputs.held = changes.objects
        runs, tells = self._axis.rank in holders, self._axis.rank == holders[0]
        if runs:
            changes.look()
            told = self._run(run, given)
        raised, made = told.failure, list[Tensor]()
        if tells:
            known = changes.known(known)
            if inputs is not None:
                known.names.update(inputs.standing)
            try:
                told.left = changes.left(known, self._device)
            except TypeError as refused:
                told = _Told(failure=refused)
                raised = refused
            told.failure = self._to_be_sent(told.failure, f"{path!r} failed on pipeline rank {holders[0]}", known)
            if inputs is not None and told.failure is None:
                told.graph, made = _graph(told, inputs, known)
        told = broadcast_batch(told, self._axis, self._device, holders[0], detach=True, purpose="outside", known=known)
        written = self._linked(told, made, link)
        if not runs and told.left is not None:
            changes.put(told.left, self._axis.rank, holders[0])
            given.do(told.done)
            if told.drawn is not None:
                generators.unpack_state(told.drawn)
        elif told.left is not None and told.graph is not None:
            changes.put_again(told.left, told.graph.stored)
        for name, x in written.items():
            _rewritten(innermost(given.tensors[name]), x)
        log_and_say(told.logs, told.said, self._module)
        if told.failure is not None:
            raise raised or told.failure
        return told.result

    def _linked(self, told: _Told, made: Sequence[Tensor], link: Link | None) -> dict[str, Tensor]:
        """Put ``told`` into the graph of all ranks; returns what was written into inputs, by their names."""
        if told.graph is None or link is None or not told.graph.tensors:
            return {}
        linked = link(told.graph, made)
        by_id = {id(x): y for x, y in zip(told.graph.tensors, linked, strict=True)}
        told.result = map_returned(lambda x: by_id.get(id(x), x), told.result)
        told.left = map_tensors(lambda x: by_id.get(id(x), x), told.left)
        return {name: linked[n] for name, n in told.graph.written.items()}

    def _to_be_sent(self, error: Exception | None, what: str, known: Known) -> Exception | None:
        """``error`` of this rank as the others raise it, whose code may wait for it: in other words where it can't be
        sent."""
        if error is None or refusal(error, self._device, known) is None:
            return error
        return RuntimeError(f"{what}: {type(error).__name__}: {error}")

    def _run(self, run: Callable[[], Any], given: Given) -> _Told:
        """Run it here, and note what it did beside computing, also before it failed."""
        start, told, memory = generators.global_state(), _Told(), given.watched()
        recorder = OutputRecorder(self._module, told.logs, told.said, dict)
        try:
            with (
                self._inside(),
                LayersHeard(self._module, recorder),
                contextlib.nullcontext() if given.counts else memory,
            ):
                told.result = run()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            told.failure = error
        why = refusal((told.logs, told.said), self._device)
        if why is not None:
            refused = f"What it logs or gives to a logger can't be sent to the other ranks of the pipeline: {why}."
            return _Told(failure=TypeError(refused))
        told.done = given.done(memory.settle(0))
        told.drawn = None if generators.same_global_state(start) else generators.packed_state()
        return told


def _graph(told: _Told, inputs: UnitInputs, known: Known) -> tuple[UnitGraph, list[Tensor]]:
    """The graph of a run that is about to be told, and its tensors here."""
    travels = [*returned_tensors(told.result), *tensors_in(told.left)]
    graph = UnitGraph([x for x in in_graph(travels) if known.name_of(x) is None])
    for name in told.done.written:
        x = inputs.rewritten(name)
        if x is not None:
            graph.written[name] = len(graph.tensors)
            graph.tensors.append(x)
    graph.find_groups(lambda leaf: inputs.name_of(leaf, known.name_of))
    graph.find_aliases([*travels, *inputs.tensors])
    graph.retains = [n for n, x in enumerate(graph.tensors) if x.retains_grad]
    moved = {*map(id, graph.tensors), *inputs.standing}
    assert told.left is not None
    changed = told.left.changed
    graph.stored = [
        name
        for name, change in (*changed.shared.items(), *changed.own.items())
        if any(id(x) in moved for x in tensors_in(change))
    ]
    return graph, [*graph.tensors]


class _Rewritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # of a view torch would take None for all of its base, beside the view, too
        return torch.zeros_like(grads[0]), grads[0]


def _rewritten(x: Tensor, value: Tensor) -> None:
    """``x`` has got ``value``: from now on it is in the graph of that."""
    with torch.enable_grad(), preserve_version(x):  # which has counted that write
        _Rewritten.apply(x, value)
