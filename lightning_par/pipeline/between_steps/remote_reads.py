"""Gradients and weights that other ranks hold, for user code between two steps: read anywhere, they are one device's.

While no step runs, ``p.grad`` of a parameter that lives on some ranks alone is a `Gradient` on every rank. Writing to
it writes where it is. Reading it sends it, so that all ranks go on with the same values; they meet before. Norms that
``torch.nn.utils`` clips by travel as one number each, in one all-reduce. Optimizers and our own code see the plain
gradient where it is, and None elsewhere. Weights are read likewise:
see `lightning_par.pipeline.between_steps.weights.remote_weight`.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_par.absent.elsewhere import Elsewhere, is_elsewhere, refuse_in_hooks
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.pipeline.between_steps.caller import sees_gradients, user_of
from lightning_par.pipeline.between_steps.gradients.gradients_alone import GradientsAlone
from lightning_par.pipeline.between_steps.gradients.own_gradient import held_here, hold, refuse_misfit
from lightning_par.pipeline.between_steps.gradients.remote_gradient import Gradient
from lightning_par.pipeline.between_steps.graphs.weight_ends import WeightEnds
from lightning_par.pipeline.between_steps.optim.adopted_optimizers import AdoptedOptimizers
from lightning_par.pipeline.between_steps.weights import weight_functions
from lightning_par.pipeline.between_steps.weights.assigned_storage import Replicas
from lightning_par.pipeline.between_steps.weights.buffers_alone import BuffersAlone
from lightning_par.pipeline.between_steps.weights.holders import Holders
from lightning_par.pipeline.between_steps.weights.remote_weight import Weight, plain, user_who_asks
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.between_steps.weights.spread_weights import SpreadWeights
from lightning_par.pipeline.between_steps.weights.weight_reads import sent
from lightning_par.pipeline.between_steps.weights.weight_writes import present
from lightning_par.private.graph import in_backward
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import name_of, sets_data
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.who_reads import is_inner

_ADVICE = "Do it in code that all ranks run, and let one rank alone log the result."


class JointGradients:
    """Shows user code the gradients of all stages.

    Args:
        module: spread by `lightning_par.pipeline.between_steps.weights.send_away.send_away`.
        placement: who holds what.
        axis: the pipeline axis.
        meeting: of the axis' ranks.

    Attributes:
        parameters: that some ranks alone hold, by name.
        in_parts: of these, the axis over which one is kept in parts where it is.
        ends: of the graph that all ranks have, in weights.
        alone: which gradients other ranks have, where they can't tell.
        buffers_alone: what their buffers hold, likewise.

    Example::

        gradients = JointGradients(module, placement, groups.pipeline, Meeting(groups.pipeline, None))
        with gradients.plain():
            module.training_step(batch, 0)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # of all stages, on all ranks
        gradients.close()
    """

    def __deepcopy__(self, memo: dict[int, object]) -> JointGradients:
        return self  # of the run, which is not copied with a trainer

    def __init__(self, module: nn.Module, placement: Placement, axis: Axis, meeting: Meeting) -> None:
        self.axis, self.meeting = axis, meeting
        self.others, self.replicas = Holders(axis), Replicas(self)
        self.run = partial(weight_functions.run, self)  # functions of weights; no frame of this file around them
        self._spread = spread = SpreadWeights(self, module, placement, axis)
        self.name_of, self.spread_name, self.is_weight = spread.name_of, spread.spread_name, spread.is_weight
        self.is_itself, self.show, self.recast = spread.is_itself, spread.show, spread.recast
        self.parameters = spread.parameters
        self.sources = {name: placement.first(name) for name in spread.names}  # who sends them
        self._shown: dict[str, weakref.ref[Gradient]] = {}  # what user code has read or set as gradients, by name
        self._known: set[str] | None = None  # names of the parameters that have a gradient, once the ranks have told
        self.alone, self.buffers_alone = GradientsAlone(self.parameters), BuffersAlone(spread.buffer_name)
        self.ends = WeightEnds(self)
        self._plain, self._unseen = 0, 0
        self.updates = False  # whether a step updates weights, by calls that are the same on all ranks
        self.needed: tuple[int, ...] | None = None  # who needs what such a call makes, where that is known
        self._holders = {name: placement.of(name, axis.size) for name in self.sources}
        mine = [(name, p.axis.name) for name, p in self.parameters.items() if isinstance(p, ShardedTensor)]
        told = axis.all_gather_object(mine, "names of weights in parts")
        self.in_parts = {name: over for theirs in told for name, over in theirs}
        self._optimizers = AdoptedOptimizers(self)
        self._state = RunState.current
        self._state.any_gradient = lambda: any(held_here(p) is not None for p in self.parameters.values())
        self._has_parts = bool(mine)
        self._show()

    def close(self) -> None:
        """Let every parameter and optimizer be what it was. No communication."""
        self._state.any_gradient = bool  # which would hold all weights
        self._hide()
        self._unseen += 1
        self._spread.forget_views()
        self.ends.close()
        self.replicas.close()
        self._optimizers.close()

    def forget(self) -> None:
        """To be called on all ranks where gradients may have come or gone."""
        self._known = None
        self._shown.clear()

    def come(self) -> None:
        """To be called on all ranks where a backward begins that gives parameters gradients."""
        self.forget()
        self.alone.come()

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """To be called on all ranks where these parameters' gradients are dropped, on whichever rank they are."""
        if not self.axis.dry:  # else the others tell
            return
        names = [name for p in parameters if (name := self.spread_name(p)) is not None]
        self.alone.drop(names)
        self.replicas.leave(names)

    def accumulated(self) -> None:
        """To be called on all ranks after a backward."""
        self.forget()
        if self.shows:
            self.replicas.refresh()

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, all code sees the plain gradients of this rank."""
        self._plain += 1
        self._hide()
        try:
            yield
        finally:
            self._plain -= 1
            self.forget()
            if not self._plain:
                self._show()
        if self.shows:
            self.replicas.refresh()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within `plain`: inside, user code sees what it sees between steps."""
        before, self._plain = self._plain, 0
        self._show()
        try:
            yield
        finally:
            self._plain = before
            self._hide()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, a step updates weights: nobody else sees what is made of them, and all ranks do the same."""
        self.updates = True
        try:
            yield
        finally:
            self.updates, self.needed = False, None

    @property
    def shows(self) -> bool:
        """Whether user code sees weights of all stages now."""
        return not (self._plain or self._unseen)

    @property
    def is_plain(self) -> bool:
        """Whether all code sees the plain gradients of this rank."""
        return bool(self._plain)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, weights are those of this rank; no communication."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    def lent(self, func: Any, args: Any, kwargs: Any, frame: types.FrameType) -> Any:
        """What ``func`` makes of weights that this rank has in parts, where the other ranks of the pipeline see it,
        too; else `NotImplemented`."""
        if not any(map(self.is_weight, tensors_in((args, kwargs)))):
            return NotImplemented
        if sets_data(func) and self.set_data(args[0], args[1], frame):  # by a step's mode, of a part
            return None
        name = name_of(func)
        user = user_who_asks(self, func, name, args, frame)
        return NotImplemented if user is None else self.run(user, func, name, args, kwargs)

    def note_copy(self, x: Tensor, copied: Tensor, frame: types.FrameType) -> None:
        """The code of ``frame`` has made a deep copy of ``x``, of which this rank has a part."""
        if self.shows and self.is_weight(x) and user_of(frame) is not None:
            self.show(copied, self.name_of(x), copied=object())

    def set_data(self, x: Tensor, value: Any, frame: types.FrameType) -> bool:
        """The code of ``frame`` sets the ``data`` of ``x``, of which this rank has a part; whether that is done."""
        shown = self.shows and self.is_weight(x) and not in_backward() and user_of(frame) is not None
        if shown:
            self.replicas.set_data(x, value)
        return shown

    def holders_of(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a spread parameter."""
        return self._holders[name]

    def present(self, name: str, value: Any, of: str) -> Any:
        """``value`` as the function ``name`` needs it to write where the parameter ``of`` is."""
        return present(self, name, value, {*self._holders[of]})

    def data_for(self, x: Tensor, value: Any) -> Any:
        """``value`` as ``x.data`` is set to it where ``x`` is: on all ranks, if it is not spread, which a value that
        is where some weight is may be unlike."""
        return value if self.is_weight(x) else present(self, "data", value, {*range(self.axis.size)})

    def adopt(self, optimizer: Any) -> None:
        """Let the steps of ``optimizer`` see what is here, but for its closure, in which hooks of the user's run."""
        self._optimizers.adopt(optimizer)

    def of(self, parameter: Tensor, held: Tensor | None) -> Tensor | None:
        """The gradient as user code sees it; ``held`` is this rank's."""
        name = self.name_of(parameter)
        if name not in self.known():
            return None
        if held is None and self.sources[name] == self.axis.rank:
            raise RuntimeError(f"The gradient of {name!r} was removed on pipeline rank {self.axis.rank} alone.")
        known = self._shown[name]() if name in self._shown else None
        if known is None or known.here is not held:  # else `p.grad is p.grad`
            known = Gradient(self, name, parameter, held)
            self._shown[name] = weakref.ref(known)
        return known

    def put(self, parameter: Tensor, value: Tensor | None, here: bool) -> None:
        """``parameter.grad = value`` in user code; ``here`` says whether this rank holds the parameter."""
        name = self.name_of(parameter)
        self._shown.pop(name, None)
        if value is None:
            self.drop([parameter])
        else:
            self.alone.put(name)
        if self._known is not None:
            self._known = self._known - {name} if value is None else self._known | {name}
        if self.is_weight(value) and not {*self._holders[name]} <= {*self._holders[self.name_of(value)]}:
            value = sent(self, "grad", value)
        lies = None if self.is_weight(value) else self.replicas.lying(value)
        if here:
            held = plain(value) if isinstance(value, Weight) else value  # as torch.ones_like(weight)
            held = held.here if isinstance(held, Gradient) else held
            # In a dry run it is another tensor in that memory, as on ranks without the weight: who looks is counted.
            hold(parameter, held.detach() if self.axis.dry and held is value and held is not None else held)
        else:
            refuse_misfit(parameter, value)
        self.replicas.set_gradient(name, value, lies)
        if isinstance(value, Gradient):  # `p.grad = g; p.grad is g`
            self._shown[name] = weakref.ref(value)

    def held(self, name: str) -> Tensor | None:
        """The gradient of the parameter ``name``, where it is."""
        return held_here(self.parameters[name])

    def read(self, parameter: Tensor, frame: types.FrameType) -> Tensor | None:
        """``parameter.grad`` in the code of ``frame``."""
        held = held_here(parameter)
        if is_inner(frame):
            return held
        if sees_gradients(frame):
            self._state.look_at_gradients()
            return self.of(parameter, held_here(parameter))
        if isinstance(parameter, Elsewhere) and parameter.requires_grad and in_backward():
            refuse_in_hooks(parameter, frame)
        return held

    def write(self, parameter: Tensor, value: Tensor | None, frame: types.FrameType) -> None:
        """``parameter.grad = value`` in the code of ``frame``."""
        if sees_gradients(frame):
            if value is not None:
                self._state.look_at_gradients()
            self.put(parameter, value, not is_elsewhere(parameter))
        else:
            hold(parameter, value)

    def known(self) -> set[str]:
        """The names of the parameters that have a gradient, on any rank."""
        if self._known is None:
            self.meet("looked which parameters have gradients")
            first = [name for name in self.parameters if self.sources[name] == self.axis.rank]
            mine = [name for name in first if held_here(self.parameters[name]) is not None]
            told = {name for names in self.axis.all_gather_object(mine, "gradients") for name in names}
            self._known = self.alone.names() if self.axis.dry else told
        return self._known

    def meet(self, doing: str) -> None:
        """Wait for the other ranks, which must do the same."""
        if self.updates:  # the step has met them
            return
        self.meeting(doing, _ADVICE)

    def _show(self) -> None:
        self._spread.show_all()
        self._optimizers.show()
        self._state.lender = self if self._has_parts else None

    def _hide(self) -> None:
        self._state.lender = None
        self._spread.hide_all()
        self._optimizers.hide()
