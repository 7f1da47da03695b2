"""Optimizers of weights on several stages: what their steps, and user code between them, see of gradients and state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_par.optim.closures import with_closures
from lightning_par.optim.optimizers import begin_anew
from lightning_par.optim.stand_ins import with_inner
from lightning_par.pipeline.between_steps.optim.optimizer_state import JointState
from lightning_par.private.optimizers import scheduler_marks

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

_REPLACED = "_replaced"
"""The attribute of an adopted optimizer's `zero_grad` that has the one before."""


def who_zeroes(optimizer: Any) -> Optimizer | None:
    """The optimizer whose gradients a call of ``optimizer.zero_grad`` drops by torch's own code; None where other code
    runs.

    A wrapper may pass for an optimizer by its `__class__`, and have the method of the one within as an attribute.
    """
    method = optimizer.zero_grad
    method = getattr(method, _REPLACED, method)
    return method.__self__ if getattr(method, "__func__", None) is Optimizer.zero_grad else None


class AdoptedOptimizers:
    """Optimizers whose steps see what is on this rank, and whose state user code sees of all stages.

    Args:
        owner: shows user code gradients and weights.
    """

    def __init__(self, owner: JointGradients) -> None:
        self._owner = owner
        self._undo: dict[int, Callable[[], None]] = {}
        self._optimizers: list[Any] = []

    def close(self) -> None:
        """Let every optimizer be what it was."""
        for undo in self._undo.values():
            undo()
        self._undo.clear()
        self._optimizers.clear()

    def adopt(self, optimizer: Any) -> None:
        """Let the steps of ``optimizer`` see what is here, but for its closure, in which hooks of the user's run."""
        if id(optimizer) in self._undo:
            return
        before = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
        step, zero_grad = optimizer.step, optimizer.zero_grad

        def in_sight(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                with self._owner.shown():
                    return closure()

            return call

        def plain_step(_: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = with_closures(in_sight, args, kwargs)
            with self._owner.plain():
                result = step(*args, **kwargs)
            self._owner.alone.stepped = True
            return result

        def forgetting(*args: Any, **kwargs: Any) -> Any:
            if getattr(zero_grad, "__func__", None) is Optimizer.zero_grad:  # it looks at each weight, and knows none
                with self._owner.plain():
                    zero_grad(*args, **kwargs)
                    if kwargs.get("set_to_none", args[0] if args else True):
                        self._owner.drop(p for group in optimizer.param_groups for p in group["params"])
                    return None
            self._owner.forget()
            result = zero_grad(*args, **kwargs)
            if self._owner.shows:
                self._owner.replicas.refresh()
            return result

        vars(forgetting)[_REPLACED] = zero_grad
        vars(plain_step).update(scheduler_marks(step))
        optimizer.step, optimizer.zero_grad = MethodType(plain_step, optimizer), forgetting
        self._optimizers += [one for one in with_inner(optimizer) if "state" in vars(one)]
        undo = contextlib.ExitStack()
        undo.callback(_put_back, optimizer, before)
        # a wrapper that never called `Optimizer.__init__` has no hooks, or keeps them where torch can't add any
        with contextlib.suppress(AttributeError, TypeError):
            undo.callback(optimizer.register_load_state_dict_post_hook(lambda _: self.show()).remove)
        self._undo[id(optimizer)] = undo.close
        self.show()

    def show(self) -> None:
        """Show user code the state of all stages, unless a step runs."""
        for optimizer in [] if self._owner.is_plain else self._optimizers:
            if not isinstance(optimizer.state, JointState):  # torch puts another one in where it loads
                optimizer.state = JointState(self._owner, optimizer)

    def hide(self) -> None:
        """Show all code the state of this rank."""
        for optimizer in self._optimizers:
            if isinstance(optimizer.state, JointState):
                changed, optimizer.state = optimizer.state.changed, optimizer.state.own
                if changed:
                    begin_anew(optimizer)


def _put_back(optimizer: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        vars(optimizer).pop(name, None)
        if value is not None:
            setattr(optimizer, name, value)
