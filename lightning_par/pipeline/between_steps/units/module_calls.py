"""The module between two steps: what user code calls or reads there is one device's, on all ranks.

A unit that is called outside a step runs where its weights are, and its result goes to all ranks. They meet before, so
that a call on one rank alone ends in an error that names the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting, refuse_alone
from lightning_par.pipeline.between_steps.graphs.unit_backward import CALLED, UnitBackward
from lightning_par.pipeline.between_steps.graphs.unlinked import no_gradients
from lightning_par.pipeline.between_steps.graphs.weight_graphs import has_graph
from lightning_par.pipeline.between_steps.remote_reads import JointGradients
from lightning_par.pipeline.between_steps.units.given_objects import Given
from lightning_par.pipeline.between_steps.units.unit_inputs import UnitInputs
from lightning_par.pipeline.between_steps.units.unit_runs import UnitRuns
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.between_steps.weights.weight_reads import brought_to_all
from lightning_par.pipeline.between_steps.weights.weight_updates import update_weights
from lightning_par.pipeline.program.update_calls import UpdateCall
from lightning_par.pipeline.run.unit_calls import LocatedCall
from lightning_par.private.module_calls import get_call
from lightning_par.private.modules import parameters_of
from lightning_par.private.transforms import without_saved_tensors_hooks
from lightning_par.python_state.set_each import set_each
from lightning_par.python_state.user_code import packages_of


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
        self._module, self._placement = module, placement
        self._gradients: JointGradients | None = None
        self._closed = False
        self._steps = 0  # that run, or units that are called from outside
        names = {id(x): name for name, x in [*module.named_parameters(), *module.named_buffers()]}
        self._holders: dict[str, tuple[int, ...]] = {}
        self._within: dict[int, str] = {}  # the modules in units
        for call in self._calls():
            tensors = [*call.module.parameters(), *call.module.buffers()]
            # who runs a unit must have all of it
            ranks = set(range(axis.size)).intersection(*(placement.of(names[id(x)], axis.size) for x in tensors))
            self._holders[call.path] = tuple(sorted(ranks))
            call.outside = self
            self._within.update({id(m): name for name, m in call.module.named_modules(prefix=call.path)})
        self.runs = UnitRuns(module, axis, device, self._within, packages_of(module), sharding, self._inside)

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
        self._closed = True
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
        fast = self._fast_weights(unit)
        given = Given(path, (args, kwargs, [*fast.values()]))
        shapes = ", ".join(f"{tuple(x.shape)}" for x in given.tensors.values())
        refuse_alone(self.axis, f"calls {path!r} outside a step")
        self.meeting(f"called {path!r} outside a step with tensors of shape {shapes}" if shapes else f"called {path!r}")
        if not torch.is_grad_enabled():
            return self.runs(path, unit, holders, given, lambda: original(*args, **kwargs))
        weights = [x for name, x in unit.named_parameters() if name not in fast]
        inputs = UnitInputs(given.tensors, weights, self._joint().ends.of, self.axis.rank in holders)

        def run() -> Any:
            try:
                # not those by which checkpointing would run more on this rank alone
                with without_saved_tensors_hooks(), holding(unit, {n: inputs.lend(x) for n, x in fast.items()}):
                    return original(*inputs.lend(args), **inputs.lend(kwargs))
            finally:
                inputs.put_back()

        link = UnitBackward(self, path, unit, holders[0], inputs).link
        return self.runs(path, unit, holders, given, run, inputs, link)

    def _fast_weights(self, unit: nn.Module) -> dict[str, Tensor]:
        """What user code has put in the place of weights of ``unit``, as `torch.func.functional_call` does: it comes to
        the unit as its arguments do. All ranks have it, or are brought it where it is a copy of a weight."""
        joint, found = self._joint(), dict[str, Tensor]()
        for name, x in unit.named_parameters(remove_duplicate=False):
            if not joint.is_weight(x):
                if not isinstance(x, nn.Parameter):
                    found[name] = x
            elif joint.spread_name(x) is None and has_graph(joint, x):
                found[name] = brought_to_all(joint, "functional_call", x)
        return found

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """A unit's code runs inside: units within it run as they are."""
        self._steps += 1
        try:
            with contextlib.nullcontext() if self._gradients is None else self._gradients.unseen():
                yield
        finally:
            self._steps -= 1

    def come_to_backward(self, doing: str, advice: str) -> JointGradients:
        """Wait for the other ranks, which must do the same, within a backward between steps.

        Raises:
            RuntimeError: the backward is that of a step, or the run has ended.
        """
        if self._steps or self._closed:
            raise RuntimeError(no_gradients(CALLED))
        self.meeting(doing, advice)
        self._joint().ends.begin()
        return self._joint()

    def holders_of(self, weight: Tensor) -> tuple[int, ...]:
        """The ranks that hold a weight."""
        name = self._joint().spread_name(weight)
        return tuple(range(self.axis.size)) if name is None else self._joint().holders_of(name)


@contextlib.contextmanager
def holding(unit: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, ``unit`` has ``weights`` by their names."""
    places: list[tuple[dict[str, Any], str]] = []
    for name in weights:
        path, _, key = name.rpartition(".")
        places.append((parameters_of(unit.get_submodule(path)), key))
    before = [held[key] for held, key in places]
    for (held, key), x in zip(places, weights.values(), strict=True):
        held[key] = x
    try:
        yield
    finally:
        for (held, key), x in zip(places, before, strict=True):
            held[key] = x
