"""Optimizer steps on sharded parameters.

An optimizer keeps the user's parameters in its param groups, and between steps its state is sharded as they are.
Torch's own that treat every element by itself step on plain stand-ins, the local parts, at foreach and fused speed. Any
other is followed, function by function; what hands tensors to code that can't be followed steps on whole copies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.absent.unread import Unread
from lightning_par.checkpoint.buffers import GivenUp
from lightning_par.optim.away_results import AwayResults
from lightning_par.optim.closures import Call, with_closures
from lightning_par.optim.following import Following
from lightning_par.optim.remote_state import StatesAway
from lightning_par.optim.rollback import Start, is_out_of_sight
from lightning_par.optim.shared_memory import Shared
from lightning_par.optim.staged_step import FollowingStages
from lightning_par.optim.stand_ins import Copies, Parts, StandIns, own, sharded_parameters, with_inner
from lightning_par.optim.torch_optimizers import BY_ELEMENT, BY_PARAMETER, runs_torchs_step
from lightning_par.optim.value_places import StagePlaces, unmarked
from lightning_par.private.optimizers import has_step_hooks, scheduler_marks
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.tensor import ShardedTensor

log = logging.getLogger(__name__)


def adopt(optimizer: Optimizer, stages: StagePlaces | None = None) -> None:
    """Make ``optimizer`` work on sharded parameters, whether they are in it now or are added later.

    Its `state_dict` shows the state of a sharded parameter sharded like it, and its `load_state_dict` takes whole or
    sharded state.

    Args:
        optimizer: of any class.
        stages: where each stage holds some of the parameters, which ones.

    Example::

        optimizer = torch.optim.AdamW(module.parameters())
        adopt(optimizer)
        optimizer.step()
    """
    for one in reversed(with_inner(optimizer)):
        adopted = vars(one).get("_lightning_par")
        if adopted is None:
            adopted = _Adopted(one)
            one._lightning_par = adopted  # type: ignore[attr-defined]
            one.step = adopted.bound_step()  # type: ignore[method-assign]
            # a wrapper that never called `Optimizer.__init__` has no hooks, or keeps them where torch can't add any
            with contextlib.suppress(AttributeError, TypeError):
                adopted.register()
        adopted.stages = stages
        adopted.begin()  # made by the user once for several fits, it has a state


def begin_anew(optimizer: Optimizer) -> None:
    """To be called on all ranks where somebody set or removed state of an adopted ``optimizer``, which may be whole."""
    adopted = vars(optimizer).get("_lightning_par")
    if adopted is not None:
        adopted.begin()


def may_go_by_loss(optimizer: Optimizer) -> bool:
    """Whether steps of an adopted ``optimizer`` may look at the loss that their closure returns."""
    adopted = vars(optimizer).get("_lightning_par")
    return adopted is None or not adopted.is_by_parameter


class _Adopted:
    """What this package does for one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.stages: StagePlaces | None = None
        self._plain: Call = optimizer.step
        self._by_element = runs_torchs_step(optimizer, optimizer.step, BY_ELEMENT)
        self.is_by_parameter = runs_torchs_step(optimizer, optimizer.step, BY_PARAMETER)
        self._can_be_followed: bool | None = None  # not known before the first step
        self._within = False  # a step, and not its closure
        self._away, self._results = StatesAway(), AwayResults()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def register(self) -> None:
        """Have torch call what is to be done when the state is loaded or asked for."""
        self.optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._cut(state_dict))
        self.optimizer.register_state_dict_post_hook(lambda _, state_dict: self._shown(state_dict))
        self.optimizer.register_load_state_dict_post_hook(lambda _: self.begin())

    def begin(self) -> None:
        """Shard the state as the parameters are; it may be whole."""
        self._away = StatesAway()
        for p in [p for p in self.optimizer.state if is_elsewhere(p)]:  # their state is on the ranks that hold them
            del self.optimizer.state[p]
        for p in sharded_parameters(self.optimizer):
            state = self.optimizer.state.get(p)
            if isinstance(state, dict):
                state.update({name: _part(p, x) for name, x in state.items()})

    # ----------------------------------------------------------------------------------------------------------- steps

    def bound_step(self) -> MethodType:
        """What ``optimizer.step`` is from now on."""

        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self.step(args, kwargs)

        vars(step).update(scheduler_marks(self._plain))  # or a scheduler would warn that it was replaced
        return MethodType(step, self.optimizer)

    def step(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Step as the user's ``optimizer.step(*args, **kwargs)`` would on one device."""
        outer = Following.current()  # of an optimizer that wraps this one
        take = self._way(outer)
        if take is None:
            return self._plain(*args, **kwargs)
        before, self._within = self._within, True
        try:
            return take(*with_closures(self._out_of_step, args, kwargs))
        finally:
            self._within = before

    def _way(self, outer: Following | None) -> Callable[[Any, dict[str, Any]], Any] | None:
        """How to step; None for as it is."""
        hooked = has_step_hooks(self.optimizer)
        if self.stages is not None and (hooked or outer is not None or not self.is_by_parameter):
            return self._plainly if outer else self._on_stages
        if self.stages is not None:
            self._away = StatesAway()
        if not any(True for _ in sharded_parameters(self.optimizer)):
            return None
        if self._by_element and not hooked:
            return self._on_parts
        if outer is not None:
            return self._plainly
        return self._on_copies if self._can_be_followed is False else self._followed

    def _out_of_step(self, closure: Call) -> Call:
        def call() -> Any:
            before, self._within = self._within, False
            result = closure()  # an error of its own is not one of the step's
            self._within = before
            return result

        return call

    def _plainly(self, args: Any, kwargs: dict[str, Any]) -> Any:
        return self._plain(*args, **kwargs)

    def _on_parts(self, args: Any, kwargs: dict[str, Any]) -> Any:
        outer = Following.current()
        with contextlib.nullcontext() if outer is None else outer.suspended():
            return self._inside(Parts(self.optimizer), args, kwargs)

    def _on_copies(self, args: Any, kwargs: dict[str, Any]) -> Any:
        return self._inside(Copies(self.optimizer), args, kwargs)

    def _on_stages(self, args: Any, kwargs: dict[str, Any]) -> Any:
        assert self.stages is not None
        try:
            return self._inside(FollowingStages(self.stages, self.optimizer, self._away, self._results), args, kwargs)
        except Exception as error:
            if not self._is_out_of_sight(error):
                raise
            raise self._refusal("while other ranks hold some of its parameters") from error

    def _followed(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """On whole copies, if code that can't be followed is met in the first step before anything was written."""
        start = None if self._can_be_followed else Start(with_inner(self.optimizer))
        if start is not None:
            args, kwargs = with_closures(start.remembered, args, kwargs)  # the step taken anew must not train twice
        try:
            result = self._inside(Following(), args, kwargs)
            self._can_be_followed = True
            return result
        except Exception as error:
            if not self._is_out_of_sight(error):
                raise
            if start is None or start.is_written():
                raise self._refusal("after it wrote into parameters of which this rank has a part") from error
        self._can_be_followed = False
        start.restore()
        if next(sharded_parameters(self.optimizer)).axis.rank == 0:
            log.warning(
                "%s hands tensors to code that can't be followed, so it steps on whole copies of its parameters.",
                type(self.optimizer).__name__,
            )
        return self._on_copies(args, kwargs)

    def _is_out_of_sight(self, error: Exception) -> bool:
        """Whether the step, not its closure, met code that can't be followed."""
        return self._within and is_out_of_sight(error)

    def _refusal(self, when: str) -> RuntimeError:
        return RuntimeError(
            f"{type(self.optimizer).__name__} hands tensors to code that can't be followed, such as torch.jit, "
            f"torch.vmap or kernels of C++, {when}. Write its step in functions of torch."
        )

    def _inside(self, surroundings: StandIns | Following, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the step with ``surroundings`` entered, but for its closures, which are the user's training step."""

        shared = Shared(self.optimizer)

        def away(closure: Call) -> Call:
            return lambda: surroundings.away(lambda: shared.away(closure))

        args, kwargs = with_closures(away, args, kwargs)
        with shared.step(), surroundings:
            return self._plain(*args, **kwargs)

    # ----------------------------------------------------------------------------------------------------------- state

    def _shown(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state as the user gets it, without what this package hangs on tensors."""
        if self._within:
            raise RuntimeError(
                f"The state of {type(self.optimizer).__name__} was asked for within its step, as from a hook that runs "
                "at the step's end. Ask for it after the step."
            )
        return state_dict if self.stages is None else map_tensors(unmarked, state_dict)

    def _cut(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict``, which may be whole, without the state of parameters, and of parts, that other ranks hold.

        Before the base class moves or casts it whole.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = [i for group in state_dict.get("param_groups", ()) for i in group["params"]]
        state = dict(state_dict.get("state", {}))
        given_up = GivenUp()
        for i, p in zip(ids, parameters):
            if is_elsewhere(p):
                state.pop(i, None)
            elif isinstance(p, ShardedTensor) and i in state:
                state[i] = {name: _part(p, x) for name, x in state[i].items()}
                given_up.add(2 * p.local.nbytes)  # boxes of a directory, or what is not whole rows of a file
        return {**state_dict, "state": state} if "state" in state_dict else state_dict


def _part(p: ShardedTensor, value: Any) -> Any:
    """``value``, sharded as ``p`` is, in memory of its own; unless it is something else than entries of ``p``."""
    if not isinstance(value, Tensor) or not value.ndim or value.shape != p.shape:
        return value
    if isinstance(value, Unread):
        return p.with_local(value.read_part(p.sharded_dim, p.positions.indices(p.axis.rank)))
    if isinstance(value, ShardedTensor):
        return p.with_local(p.part_of(value))
    return p.with_local(own(p.part_of(value), value))
