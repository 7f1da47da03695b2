"""Optimizer steps on sharded parameters.

An optimizer keeps the user's parameters in its param groups. For the length of a step, plain stand-ins take their
place: the local parts, where the optimizer treats every element by itself, at foreach and fused speed; else whole
copies, gathered and cut again. Which of the two is found out by a trial, not by the class' name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.view import ShardedTensor


def adopt(optimizer: Optimizer) -> None:
    """Make ``optimizer.step`` work on sharded parameters, whether they are in it now or are added later.

    Example::

        optimizer = torch.optim.AdamW(module.parameters())
        adopt(optimizer)
        optimizer.step()
    """
    if "_lightning_par_stand_ins" in vars(optimizer):
        return
    stand_ins = _StandIns(optimizer)
    plain = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if not any(True for _ in _sharded(self)):
            return plain(closure, **kwargs) if closure is not None else plain(**kwargs)
        with stand_ins:
            if closure is None:
                return plain(**kwargs)
            return plain(lambda: stand_ins.away(closure), **kwargs)

    vars(step).update(
        {key: value for key, value in getattr(plain, "__dict__", {}).items() if key.startswith("_wrapped")}
    )
    optimizer._lightning_par_stand_ins = stand_ins  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def keeps_local_state(optimizer: Optimizer) -> bool:
    """Whether the state of a sharded parameter is sharded like it; else it is whole on every rank."""
    stand_ins = vars(optimizer).get("_lightning_par_stand_ins")
    return stand_ins is None or stand_ins.local


def _sharded(optimizer: Optimizer) -> Iterator[ShardedTensor]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if isinstance(p, ShardedTensor))


class _StandIns:
    """Puts stand-ins into an optimizer's param groups and state, and takes them out again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._pairs: list[tuple[ShardedTensor, Tensor]] = []
        self._local: bool | None = None

    @property
    def local(self) -> bool:
        if self._local is None:
            self._local = acts_elementwise(self.optimizer)
        return self._local

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __enter__(self) -> None:
        parameters = list(_sharded(self.optimizer))
        self._pairs = [(p, p.local if self.local else _whole(p)) for p in parameters]
        self._swap({id(p): stand_in for p, stand_in in self._pairs})

    def __exit__(self, *exception: Any) -> None:
        self._swap({id(stand_in): p for p, stand_in in self._pairs})
        if not self.local:
            with torch.no_grad():
                for p, stand_in in self._pairs:
                    p.local.copy_(p.part_of(stand_in.detach()))
        self._pairs = []

    def away(self, closure: Callable[[], Any]) -> Any:
        """Run the closure, which is the user's whole training step, with the user's own parameters in place."""
        before = [stand_in for _, stand_in in self._pairs]
        self.__exit__()
        try:
            return closure()
        finally:
            parameters = list(_sharded(self.optimizer))
            # The optimizer may hold on to the stand-ins that it met before the closure, so they are used again.
            self._pairs = [(p, p.local) for p in parameters] if self.local else _refreshed(parameters, before)
            self._swap({id(p): stand_in for p, stand_in in self._pairs})

    def _swap(self, new: dict[int, Tensor]) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [new.get(id(p), p) for p in group["params"]]
        state = self.optimizer.state
        for key in [key for key in state if id(key) in new]:
            state[new[id(key)]] = state.pop(key)


def _whole(p: ShardedTensor) -> Tensor:
    with torch.no_grad():
        stand_in = nn.Parameter(p.full_tensor("optimizer").clone(), requires_grad=p.requires_grad)
        grad = p.grad
        stand_in.grad = grad.full_tensor("optimizer") if isinstance(grad, ShardedTensor) else None
    return stand_in


def _refreshed(parameters: list[ShardedTensor], before: list[Tensor]) -> list[tuple[ShardedTensor, Tensor]]:
    pairs = []
    for i, p in enumerate(parameters):
        now = _whole(p)
        if i < len(before) and before[i].shape == now.shape:
            before[i].data, before[i].grad = now.data, now.grad
            now = before[i]
        pairs.append((p, now))
    return pairs


def acts_elementwise(optimizer: Optimizer) -> bool:
    """Whether two steps on a whole tensor equal two steps on its halves, each in an optimizer of its own.

    Tried on small tensors with the optimizer's own class and options, split along either dim. An optimizer that can't
    be made for the trial counts as one that does not.
    """
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    device = devices[0] if devices else torch.device("cpu")
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), contextlib.suppress(Exception), torch.enable_grad():
        torch.manual_seed(0)
        value = torch.randn(8, 6, device=device, dtype=torch.float32)
        grads = [torch.randn_like(value) * scale for scale in (1.0, 0.01)]
        whole = _stepped(optimizer, value, grads)
        for dim in (0, 1):
            halves = [
                _stepped(optimizer, v, [g.chunk(2, dim)[i] for g in grads]) for i, v in enumerate(value.chunk(2, dim))
            ]
            if not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-5, atol=1e-7):
                return False
        return not torch.equal(whole, value)
    return False


def _stepped(optimizer: Optimizer, value: Tensor, grads: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(value.clone())
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {**optimizer.defaults, **{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}}
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items() if k in accepted}
    trial = type(optimizer)([parameter], **options)
    for grad in grads:
        parameter.grad = grad.clone()
        trial.step()
    return parameter.detach()
