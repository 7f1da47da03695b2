"""Optimizer steps on sharded parameters.

An optimizer keeps the user's parameters in its param groups. For the length of a step, plain stand-ins take their
place: the local parts, where the optimizer treats every element by itself, at foreach and fused speed; else whole
copies, gathered and cut again. Which of the two is found out by a trial of each param group, not by the class' name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.checkpoint.scratch import GivenUp
from lightning_par.checkpoint.unread import Unread
from lightning_par.elementwise import acts_elementwise, kinds
from lightning_par.pipeline.elsewhere import is_elsewhere
from lightning_par.view import ShardedTensor


def adopt(optimizer: Optimizer) -> None:
    """Make ``optimizer`` work on sharded parameters, whether they are in it now or are added later.

    Its `step` takes every parameter's local part or whole, its `state_dict` shows the state of a sharded parameter
    sharded like it, and its `load_state_dict` takes whole or sharded state.

    Example::

        optimizer = torch.optim.AdamW(module.parameters())
        adopt(optimizer)
        optimizer.step()
    """
    stand_ins = _stand_ins(optimizer)
    if stand_ins is not None:  # made by the user once for several fits
        stand_ins.begin()
        return
    stand_ins = _StandIns(optimizer)
    stand_ins.begin()
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
    with contextlib.suppress(AttributeError):  # a wrapper that never called `Optimizer.__init__` has no hooks
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: stand_ins.of_those_here(state_dict))
        optimizer.register_state_dict_post_hook(lambda _, state_dict: stand_ins.viewed(state_dict))
        optimizer.register_load_state_dict_post_hook(lambda _: stand_ins.begin())


def sharded_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` with state that lies as its parameter does as sharded tensors. No communication."""
    stand_ins = _stand_ins(optimizer)
    return state_dict if stand_ins is None else stand_ins.viewed(state_dict)


def parts_of_state(optimizer: Optimizer) -> Iterator[tuple[ShardedTensor, dict[str, Any], str]]:
    """(parameter, its state, name) wherever ``optimizer.state[parameter][name]`` lies as the sharded parameter does."""
    stand_ins = _stand_ins(optimizer)
    if stand_ins is None:
        return
    for p in stand_ins.local_parameters():
        state = optimizer.state.get(p, {})
        for name in [name for name, value in state.items() if _is_part(value, p)]:
            yield p, state, name


def _stand_ins(optimizer: Optimizer) -> _StandIns | None:
    return vars(optimizer).get("_lightning_par_stand_ins")


def _sharded(optimizer: Optimizer) -> Iterator[ShardedTensor]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if isinstance(p, ShardedTensor))


def _is_part(value: Any, p: ShardedTensor) -> bool:
    plain = isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
    return plain and value.ndim > 0 and value.shape == p.local.shape


class _StandIns:
    """Puts stand-ins into an optimizer's param groups and state, and takes them out again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._pairs: list[tuple[ShardedTensor, Tensor]] = []
        # By index of the param group: whether its state is local, and the options that were tried.
        self._local: list[bool] = []
        self._tried: list[dict[str, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def begin(self) -> None:
        """Bring the state to what the param groups, as they are now, ask for; it may be whole."""
        self._local, self._tried = [], []
        for p in [p for p in self.optimizer.state if is_elsewhere(p)]:
            del self.optimizer.state[p]
        self._decide()
        for p in self.local_parameters():
            state = self.optimizer.state.get(p, {})
            for name, value in state.items():
                if isinstance(value, ShardedTensor):
                    state[name] = p.part_of(value)
                elif isinstance(value, Tensor) and value.ndim > 0 and value.shape == p.shape:
                    state[name] = _own(p.part_of(value), value)
        for p in _sharded(self.optimizer):  # those of other groups, if what was loaded has changed a group's options
            for name, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, ShardedTensor):
                    self.optimizer.state[p][name] = value.full_tensor("optimizer")

    def local_parameters(self) -> list[ShardedTensor]:
        """The sharded parameters whose stand-in is their local part."""
        groups = self.optimizer.param_groups[: len(self._local)]
        return [
            p
            for group, local in zip(groups, self._local, strict=True)
            if local
            for p in group["params"]
            if isinstance(p, ShardedTensor)
        ]

    def viewed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See `sharded_state`."""
        if self._pairs:
            raise RuntimeError(
                f"The state of {type(self.optimizer).__name__} was asked for within its step, as from a hook that runs "
                "at the step's end. Ask for it after the step."
            )
        self._decide()
        local = {id(p) for p in self.local_parameters()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = [i for group in state_dict.get("param_groups", ()) for i in group["params"]]
        if not local or len(ids) != len(parameters):
            return state_dict
        state = dict(state_dict["state"])
        for i, p in zip(ids, parameters, strict=True):
            if id(p) in local and i in state:
                state[i] = {name: p.with_local(x) if _is_part(x, p) else x for name, x in state[i].items()}
        return {**state_dict, "state": state}

    def of_those_here(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict``, which may be whole, without the state of parameters, and of parts, that other ranks hold."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = [i for group in state_dict.get("param_groups", ()) for i in group["params"]]
        local = {id(p) for p in self.local_parameters()}
        state = dict(state_dict.get("state", {}))
        given_up = GivenUp()
        for i, p in zip(ids, parameters):
            if is_elsewhere(p):
                state.pop(i, None)
            elif id(p) in local and i in state:  # cut before the base class moves or casts it whole
                state[i] = {name: _cut(p, x) for name, x in state[i].items()}
                given_up.add(2 * p.local.nbytes)  # boxes of a directory, or what is not whole rows of a file
        return {**state_dict, "state": state} if "state" in state_dict else state_dict

    def _decide(self) -> None:
        """Try the param groups that are new, or whose options have changed in kind."""
        for index, group in enumerate(self.optimizer.param_groups):
            options = kinds(group)
            if index < len(self._tried) and self._tried[index] == options:
                continue
            has_sharded = any(isinstance(p, ShardedTensor) for p in group["params"])
            local = has_sharded and acts_elementwise(self.optimizer, group)
            if index == len(self._tried):
                self._tried.append(options)
                self._local.append(local)
            elif has_sharded:
                self._tried[index] = options
                if self._local[index] and not local:
                    self._gather_state(group)
                    self._local[index] = False  # and once whole, the state stays so

    def _gather_state(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if isinstance(p, ShardedTensor):
                state = self.optimizer.state.get(p, {})
                for name, value in state.items():
                    if _is_part(value, p):
                        state[name] = p.with_local(value).full_tensor("optimizer")

    def __enter__(self) -> None:
        self._decide()
        self._enter(None)

    def _enter(self, before: list[tuple[ShardedTensor, Tensor]] | None) -> None:
        local = {id(p) for p in self.local_parameters()}
        old = {id(p): stand_in for p, stand_in in before or ()}
        self._pairs = [
            (p, p.local if id(p) in local else _whole(p, old.get(id(p))))
            for p in dict.fromkeys(_sharded(self.optimizer))
        ]
        self._swap({id(p): stand_in for p, stand_in in self._pairs})

    def __exit__(self, *exception: Any) -> None:
        self._swap({id(stand_in): p for p, stand_in in self._pairs})
        with torch.no_grad():
            for p, stand_in in self._pairs:
                if stand_in is not p.local:
                    p.local.copy_(p.part_of(stand_in.detach()))
        self._pairs = []

    def away(self, closure: Callable[[], Any]) -> Any:
        """Run the closure, which is the user's whole training step, with the user's own parameters in place.

        If it raises they stay in place: gathering anew would wait for ranks that may have not failed.
        """
        before = self._pairs
        self.__exit__()
        result = closure()
        self._decide()
        self._enter(before)
        return result

    def _swap(self, new: dict[int, Tensor]) -> None:
        for optimizer in _with_inner(self.optimizer):
            for group in optimizer.param_groups:
                if any(id(p) in new for p in group["params"]):
                    group["params"][:] = [new.get(id(p), p) for p in group["params"]]
            state = optimizer.state
            if any(id(key) in new for key in state):
                items = [(new.get(id(key), key), value) for key, value in state.items()]
                state.clear()  # and filled again, since the order of its keys is that in checkpoints
                state.update(items)


def _cut(p: ShardedTensor, value: Any) -> Any:
    """``value``, sharded as ``p`` is, in memory of its own; unless it is something else than entries of ``p``."""
    if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or not value.ndim or value.shape != p.shape:
        return value
    if isinstance(value, Unread):
        return p.with_local(value.read_part(p.sharded_dim, p.positions.indices(p.axis.rank)))
    return p.with_local(_own(p.part_of(value), value))


def _own(part: Tensor, value: Tensor) -> Tensor:
    """``part`` of ``value``, in memory of its own."""
    shared = part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return part.clone() if shared else part


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and those that it wraps."""
    found = [optimizer]
    for one in found:
        held = (x for value in vars(one).values() for x in (value if isinstance(value, (list, tuple)) else [value]))
        found.extend(x for x in held if isinstance(x, Optimizer) and all(x is not y for y in found))
    return found


@torch.no_grad()
def _whole(p: ShardedTensor, before: Tensor | None) -> Tensor:
    """A whole copy of ``p`` and its gradient; in ``before``, which the optimizer may hold on to, where there is one."""
    whole = p.full_tensor("optimizer").clone()
    grad = p.grad
    whole_grad = grad.full_tensor("optimizer") if isinstance(grad, ShardedTensor) else None
    if before is None or before.shape != whole.shape:
        before = nn.Parameter(whole, requires_grad=p.requires_grad)
    else:
        before.data = whole
    before.grad = whole_grad
    return before
