"""What autograd and `torch.nn.Module` read of a sharded tensor, and write: the same of its local one."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.sharded import aliases, parameter_hooks
from lightning_par.sharded.graph_node import PARTS, as_asked
from lightning_par.sharded.parts import note_part
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.who_reads import is_inner

if TYPE_CHECKING:
    from lightning_par.sharded.tensor import ShardedTensor


class LocalAutograd(torch.Tensor):
    """The part of `ShardedTensor` that is about gradients; its ``local`` is what autograd knows."""

    _local: Tensor
    _axis: Axis
    _name: str
    _shown_grad: weakref.ref[ShardedTensor] | None = None
    """What was read or set as the gradient last: the same object for as long as somebody has it, as on one device."""

    if TYPE_CHECKING:

        def with_local(self, local: Tensor) -> ShardedTensor: ...

        def part_of(self, value: Tensor) -> Tensor: ...

        def _own_part(self, value: Tensor) -> tuple[Tensor, bool]: ...

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value
        note_part(self._local, self._axis)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        lender = vars(self).get("_lender")  # shows user code the gradients of a pipeline's other stages
        if lender is not None:
            return lender.read(self, sys._getframe(1))  # type: ignore[no-any-return]
        self.look_at_gradient(sys._getframe(1))
        return self.own_grad()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        lender = vars(self).get("_lender")
        if lender is not None:
            lender.write(self, value, sys._getframe(1))
            return
        self.look_at_gradient(sys._getframe(1))
        self.set_own_grad(value)

    def look_at_gradient(self, frame: types.FrameType) -> None:
        """The code of ``frame`` is about to read or set the gradient."""
        state = RunState.current
        if state.looked_at is not None and not is_inner(frame):
            state.looked_at(self._local)

    def own_grad(self) -> Tensor | None:
        """The gradient, of which this rank holds a part."""
        grad = self._local.grad
        if grad is None:
            return None
        known = None if self._shown_grad is None else self._shown_grad()
        if known is not None and known._local is grad and self._lies_as(known):
            return known  # `p.grad is p.grad`
        found = self.with_local(grad)
        self._shown_grad = weakref.ref(found)
        if self._name and RunState.current.names.on:
            found._name = f"the gradient of {self._name}"
        return found

    def set_own_grad(self, value: Tensor | None) -> None:
        """Let ``value`` be the gradient, here and on the other ranks along the axis."""
        if value is None:
            self._local.grad = None
            return
        with DisableTorchFunction():
            part, shares = self._own_part(value)
            if shares and self._lies_as(value):  # `p.grad = g; p.grad is g`
                part, self._shown_grad = value._local, weakref.ref(value)
            self._local.grad = part
        if not shares:
            aliases.link(self.with_local(self._local.grad), value)

    def _lies_as(self, x: Tensor) -> TypeGuard[ShardedTensor]:
        """Whether ``x``, which has no graph, is sharded as this tensor is."""
        mine, other = cast("ShardedTensor", self), cast("ShardedTensor", x)
        alike = isinstance(x, LocalAutograd) and not x.requires_grad
        return alike and other._dim == mine._dim and other._positions is mine._positions and other._axis is mine._axis

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return as_asked(self._local.grad_fn, self._local, sys._getframe(1), PARTS)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._local.is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local.retains_grad

    def retain_grad(self) -> None:
        note_part(self._local, self._axis)
        self._local.retain_grad()

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As `torch.Tensor.register_hook`; the hook meets a sharded gradient."""
        stored = vars(self).get("_stored_weight")
        if stored is not None:  # see `lightning_par.sharded.patches.gradient_hooks`
            return stored.register_hook(hook)
        if self._local.is_leaf and self._local.requires_grad:
            return parameter_hooks.register(cast("ShardedTensor", self), hook)

        def local_hook(grad: Tensor) -> Tensor | None:
            result = hook(self.with_local(grad))
            return None if result is None else self.part_of(result)

        note_part(self._local, self._axis)
        return self._local.register_hook(local_hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        stored = vars(self).get("_stored_weight")
        if stored is not None:
            return stored.register_post_accumulate_grad_hook(hook)
        if self._local.is_leaf and self._local.requires_grad:
            return parameter_hooks.register(cast("ShardedTensor", self), hook, after=True)
        return self._local.register_post_accumulate_grad_hook(hook)  # which says why it can't
