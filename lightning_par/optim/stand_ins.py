"""Plain tensors in an optimizer's param groups and state, in place of sharded ones, for the length of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.sharded.tensor import ShardedTensor


class StandIns:
    """Puts plain tensors into an optimizer's param groups and state while it is entered. Subclasses say which."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._pairs: list[tuple[ShardedTensor, Tensor]] = []

    def __enter__(self) -> None:
        different = {id(p): p for p in sharded_parameters(self.optimizer)}
        self._pairs = [(p, self.stand_in(p)) for p in different.values()]
        self._swap({id(p): (p, stand_in, stand_in) for p, stand_in in self._pairs}, self.states_in)

    def __exit__(self, *exception: Any) -> None:
        self._swap({id(stand_in): (p, stand_in, p) for p, stand_in in self._pairs}, self.states_out)
        for p, stand_in in self._pairs:
            self.finish(p, stand_in)
        self._pairs = []

    def away(self, closure: Callable[[], Any]) -> Any:
        """Run the closure with the user's own parameters in place.

        If it raises they stay in place: gathering anew would wait for ranks that may have not failed.
        """
        self.__exit__()
        result = closure()
        self.__enter__()
        return result

    def stand_in(self, p: ShardedTensor) -> Tensor:
        raise NotImplementedError

    def states_in(self, p: ShardedTensor, stand_in: Tensor, state: dict[Any, Any]) -> None:
        """Make the state of ``p`` that of what stands in for it."""
        raise NotImplementedError

    def states_out(self, p: ShardedTensor, stand_in: Tensor, state: dict[Any, Any]) -> None:
        """Undo `states_in`, also for what the step has added."""
        raise NotImplementedError

    def finish(self, p: ShardedTensor, stand_in: Tensor) -> None:
        """The step has ended."""

    def _swap(
        self,
        new: dict[int, tuple[ShardedTensor, Tensor, Tensor]],
        change: Callable[[ShardedTensor, Tensor, dict[Any, Any]], None],
    ) -> None:
        """Replace parameters, by their ids, by the last of what is ``new``, and ``change`` their state."""
        for optimizer in with_inner(self.optimizer):
            for group in optimizer.param_groups:
                group["params"][:] = [new[id(p)][2] if id(p) in new else p for p in group["params"]]
            state = optimizer.state
            items = list(state.items())
            state.clear()  # and filled again, since the order of its keys is that in checkpoints
            for key, value in items:
                pair = new.get(id(key))
                state[key if pair is None else pair[2]] = value
                if pair is not None and isinstance(value, dict):
                    change(pair[0], pair[1], value)


class Parts(StandIns):
    """This rank's parts stand in."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._views: dict[int, ShardedTensor] = {}  # by the id of the part; they are not made anew in each step

    def stand_in(self, p: ShardedTensor) -> Tensor:
        return p._local

    def states_in(self, p: ShardedTensor, stand_in: Tensor, state: dict[Any, Any]) -> None:
        for name, x in state.items():
            if isinstance(x, ShardedTensor):
                state[name] = part = x._local
                self._views[id(part)] = x

    def states_out(self, p: ShardedTensor, stand_in: Tensor, state: dict[Any, Any]) -> None:
        for name, x in state.items():
            view = self._views.get(id(x))
            if view is not None:
                state[name] = view
            elif _lies_like(x, stand_in):  # the step has added it
                state[name] = p.with_local(x)


class Copies(StandIns):
    """Whole copies stand in, gathered when the step begins and cut when it ends."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._made: dict[int, nn.Parameter] = {}

    @torch.no_grad()
    def stand_in(self, p: ShardedTensor) -> Tensor:
        """A whole copy of ``p`` and its gradient; the one before, which the optimizer may hold on to."""
        whole, grad = p.full_tensor("optimizer").clone(), p.grad
        copy = self._made.setdefault(id(p), nn.Parameter(whole, requires_grad=p.requires_grad))
        copy.data = whole
        copy.grad = grad.full_tensor("optimizer") if isinstance(grad, ShardedTensor) else None
        return copy

    def states_in(self, p: ShardedTensor, stand_in: Tensor, state: dict[Any, Any]) -> None:
        for name, x in state.items():
            if isinstance(x, ShardedTensor):
                state[name] = x.full_tensor("optimizer")

    def states_out(self, p: ShardedTensor, stand_in: Tensor, state: dict[Any, Any]) -> None:
        for name, x in state.items():
            if _lies_like(x, stand_in):
                state[name] = p.with_local(own(p.part_of(x), x))

    @torch.no_grad()
    def finish(self, p: ShardedTensor, stand_in: Tensor) -> None:
        p.local.copy_(p.part_of(stand_in.detach()))


def _lies_like(x: Any, p: Tensor) -> bool:
    """Whether ``x`` has an entry for each of ``p``."""
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape == p.shape


def sharded_parameters(optimizer: Optimizer) -> Iterator[ShardedTensor]:
    """The parameters of ``optimizer`` that are sharded."""
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if isinstance(p, ShardedTensor))


def own(part: Tensor, value: Tensor) -> Tensor:
    """``part`` of ``value``, in memory of its own."""
    shared = part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return part.clone() if shared else part


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and those that it wraps."""
    found = [optimizer]
    for one in found:
        held = (x for value in vars(one).values() for x in (value if isinstance(value, (list, tuple)) else [value]))
        found.extend(x for x in held if isinstance(x, Optimizer) and all(x is not y for y in found))
    return found
