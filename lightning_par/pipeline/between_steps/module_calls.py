"""The module between two steps: what user code calls or reads there is one device's, on all ranks.

A unit that is called outside a step runs where its weights are, and its result goes to all ranks. They meet before, so
that a call on one rank alone ends in an error that names the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import broadcast_batch, refusal
from lightning_par.mesh.handshake import Meeting, refuse_alone
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.between_steps.given_objects import Done, Given
from lightning_par.pipeline.between_steps.remote_reads import JointGradients
from lightning_par.pipeline.between_steps.send_away import Placement
from lightning_par.pipeline.between_steps.unit_changes import Left, UnitChanges
from lightning_par.pipeline.between_steps.unlinked import unlinked
from lightning_par.pipeline.between_steps.weight_updates import update_weights
from lightning_par.pipeline.effects.console import Said
from lightning_par.pipeline.effects.effects import log_and_say
from lightning_par.pipeline.effects.logged_outputs import LayersHeard, LogRecord, OutputRecorder
from lightning_par.pipeline.program.update_calls import UpdateCall
from lightning_par.pipeline.run.unit_calls import LocatedCall
from lightning_par.private.module_calls import get_call
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.python_state.set_each import set_each
from lightning_par.python_state.user_code import packages_of


@dataclass
class _Told:
    """What a call of a unit did, on its way to the ranks that did not run it."""

    result: Any = None
    done: Done = field(default_factory=Done)
    left: Left | None = None
    drawn: bytes | None = None
    logs: list[LogRecord] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    failure: Exception | None = None


class Outside:
    """Carries out calls of units outside steps.

    Args:
        module: spread, its units intercepted.
        placement: who holds what.
        axis: the pipeline axis.
        device: of this rank.
        meeting: of the axis' ranks.
        sharding: the axes along which tensors may be sharded.

    Attributes:
        tell_alone: called with what other ranks would be asked, where none is there, as in a dry run.

    Example::

        outside = Outside(module, placement, groups.pipeline, device, Meeting(groups.pipeline, None))
        y = module(x)  # on all ranks
        with outside.step():
            loss = module.training_step(batch, 0)
        outside.close()
    """

    tell_alone: tuple[Callable[[JointGradients], None], ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Outside:
        return self  # of the run, which is not copied with a trainer

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        axis: Axis,
        device: torch.device,
        meeting: Meeting,
        sharding: tuple[Axis, ...] = (),
    ) -> None:
        self.axis, self.device, self.meeting = axis, device, meeting
        self._module, self._placement, self._sharding = module, placement, sharding
        self._gradients: JointGradients | None = None
        self._steps = 0  # that run, or units that are called from outside
        names = {id(x): name for name, x in [*module.named_parameters(), *module.named_buffers()]}
        self._holders: dict[str, tuple[int, ...]] = {}
        self._within: dict[int, str] = {}  # the modules in units
        self._packages = packages_of(module)
        for call in self._calls():
            tensors = [*call.module.parameters(), *call.module.buffers()]
            # who runs a unit must have all of it
            ranks = set(range(axis.size)).intersection(*(placement.of(names[id(x)], axis.size) for x in tensors))
            self._holders[call.path] = tuple(sorted(ranks))
            call.outside = self
            self._within.update({id(m): name for name, m in call.module.named_modules(prefix=call.path)})

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Inside, a step runs, which has its own ways."""
        plain = contextlib.nullcontext() if self._gradients is None else self._gradients.plain()
        self._steps += 1
        try:
            with plain:
                yield
        finally:
            self._steps -= 1

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Within `step`: inside, all is as outside of it. All ranks must call it."""
        if self._gradients is None:
            with self._joint().plain():
                pass
        before, self._steps = self._steps, 0
        try:
            with self._joint().shown():
                yield
        finally:
            self._steps = before

    def update_weights(self, calls: Sequence[UpdateCall]) -> None:
        """Within `step`: what a step does with weights alone. All ranks must call it."""
        with self.outside(), self._joint().updating():
            update_weights(self._joint(), self._module, calls)

    def adopt(self, optimizer: Any) -> None:
        """Show user code all gradients, and ``optimizer`` those that are here."""
        self._joint().adopt(optimizer)

    def _joint(self) -> JointGradients:
        if self._gradients is None:
            self._placement.follow(self._module.named_parameters())
            self._gradients = JointGradients(self._module, self._placement, self.axis, self.meeting)
            for told in self.tell_alone:
                told(self._gradients)
        return self._gradients

    def drop_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Drop those of ``parameters``, whichever ranks have them. All ranks must call it."""
        set_each(parameters, "grad", repeat(None))
        if self._gradients is not None:
            self._gradients.drop(parameters)

    def begin_backward(self) -> None:
        """To be called on all ranks where a backward begins."""
        if self._gradients is not None:
            self._gradients.come()

    def end_backward(self) -> None:
        """To be called on all ranks after a backward."""
        if self._gradients is not None:
            self._gradients.accumulated()

    def close(self) -> None:
        """Put everything back. No communication."""
        if self._gradients is not None:
            self._gradients.close()
        for call in self._calls():
            call.outside = None

    def _calls(self) -> Iterator[LocatedCall]:
        for unit in self._module.modules():
            call = get_call(unit)
            if isinstance(call, LocatedCall):
                yield call

    def __call__(self, path: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the unit ``path``; its result, on all ranks.

        Raises:
            RuntimeError: a rank did not come in time, came for something else, or the unit failed there.
            TypeError: an argument is an object that the unit may change, and into which can't be seen.
        """
        if self._steps or self.is_everywhere(path):
            return original(*args, **kwargs)
        return self._carry_out(path, unit, original, args, kwargs)

    def is_everywhere(self, path: str) -> bool:
        """Whether all ranks run the unit ``path``."""
        return len(self._holders[path]) == self.axis.size

    def _carry_out(self, path: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        holders = self._holders[path]
        given = Given(path, (args, kwargs))
        shapes = ", ".join(f"{tuple(x.shape)}" for x in given.tensors.values())
        refuse_alone(self.axis, f"calls {path!r} outside a step")
        self.meeting(f"called {path!r} outside a step with tensors of shape {shapes}" if shapes else f"called {path!r}")
        told = _Told()
        changes = UnitChanges(path, unit, self._within, self._packages)
        known = given.known(self._sharding, late=changes.objects)
        if self.axis.rank in holders:
            changes.look()
            told = self._run(original, args, kwargs, given)
        raised = told.failure
        if self.axis.rank == holders[0]:
            known = changes.known(known)
            try:
                told.left = changes.left(known, self.device)
            except TypeError as refused:
                told = _Told(failure=refused)
                raised = refused
            told.failure = self._to_be_sent(told.failure, f"{path!r} failed on pipeline rank {holders[0]}", known)
        told = broadcast_batch(told, self.axis, self.device, holders[0], detach=True, purpose="outside", known=known)
        if self.axis.rank not in holders and told.left is not None:
            changes.put(told.left, self.axis.rank, holders[0])
            given.do(told.done)
            if told.drawn is not None:
                generators.unpack_state(told.drawn)
        log_and_say(told.logs, told.said, self._module)
        if told.failure is not None:
            raise raised or told.failure
        of = [x for x in (*given.tensors.values(), *unit.parameters()) if x.requires_grad]
        return map_tensors(partial(_linked, of), told.result) if torch.is_grad_enabled() and of else told.result

    def _to_be_sent(self, error: Exception | None, what: str, known: Known) -> Exception | None:
        """``error`` of this rank as the others raise it, whose code may wait for it: in other words where it can't be
        sent."""
        if error is None or refusal(error, self.device, known) is None:
            return error
        return RuntimeError(f"{what}: {type(error).__name__}: {error}")

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any, given: Given) -> _Told:
        """Call the unit here, and note what it did beside computing, also before it failed."""
        start, told, memory = generators.global_state(), _Told(), given.watched()
        self._steps += 1  # units within this one run as they are
        unseen = contextlib.nullcontext() if self._gradients is None else self._gradients.unseen()
        recorder = OutputRecorder(self._module, told.logs, told.said, dict)
        try:
            with unseen, LayersHeard(self._module, recorder), contextlib.nullcontext() if given.counts else memory:
                told.result = original(*args, **kwargs)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            told.failure = error
        finally:
            self._steps -= 1
        why = refusal((told.logs, told.said), self.device)
        if why is not None:
            refused = f"What it logs or gives to a logger can't be sent to the other ranks of the pipeline: {why}."
            return _Told(failure=TypeError(refused))
        told.done = given.done(memory.settle(0))
        told.drawn = None if generators.same_global_state(start) else generators.packed_state()
        return told


def _linked(of: Sequence[Tensor], x: Tensor) -> Tensor:
    return unlinked(x, "a module of a pipeline returns outside a step", of)
