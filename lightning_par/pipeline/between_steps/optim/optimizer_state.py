"""What an optimizer keeps of the parameters of all stages, for user code between two steps.

While no step runs, ``optimizer.state`` of every rank has an entry for each parameter that has one on any rank. The
tensors in it are read and written as the weights are: see `weight_functions`. What is set or removed is set or removed
where the parameter is. Optimizers and our own code see what is kept on this rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import Elsewhere, is_elsewhere
from lightning_par.mesh.broadcast import Kind, kind_of
from lightning_par.pipeline.between_steps.caller import user_of
from lightning_par.private.graph import in_backward
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.pytree import tree_map
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

_DOING = "looked at an optimizer's state between two steps"


@dataclass(frozen=True)
class _Away:
    """A tensor that other ranks hold."""

    kind: Kind


class _HeldElsewhere(Elsewhere):
    """A tensor of the state which has no memory on this rank."""

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """What it takes here, as programs ask that look where memory goes."""
        return 0


class JointState(MutableMapping[Any, Any]):
    """``optimizer.state`` while no step runs.

    Args:
        owner: carries tensors over the ranks.
        optimizer: whose state it is; it has its own one, which `own` is then.

    Attributes:
        own: what is kept on this rank.
        changed: whether user code set or removed any of it.

    Example::

        optimizer.state = JointState(owner, optimizer)
        moments = {p: state["exp_avg"].norm() for p, state in optimizer.state.items()}  # of all stages
        optimizer.state = optimizer.state.own
    """

    def __init__(self, owner: JointGradients, optimizer: Optimizer) -> None:
        self.own: Any = optimizer.state
        self.owner, self._optimizer = owner, optimizer
        self._all: dict[Any, Any] | None = None  # of all stages, once they were asked for
        self.changed = False

    def __getitem__(self, key: Any) -> Any:
        states = self._states()
        if states is not self.own and key not in states:
            factory = getattr(self.own, "default_factory", None)
            if factory is None:
                raise KeyError(key)
            self[key] = factory()
        return states[key]

    def __setitem__(self, key: Any, state: Any) -> None:
        states, name = self._states(), self.owner.spread_name(key)
        self.changed |= states is not self.own
        if states is self.own or name is None or not isinstance(state, dict):
            self.own[key] = states[key] = state
            return
        if not is_elsewhere(key):
            self.own[key] = {}
        states[key] = _Entry(self, name, key, {})
        states[key].update(state)

    def __delitem__(self, key: Any) -> None:
        states = self._states()
        del states[key]
        if states is not self.own:
            self.changed = True
            self.own.pop(key, None)

    def __contains__(self, key: Any) -> bool:
        return key in self._states()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states())

    def __len__(self) -> int:
        return len(self._states())

    def __repr__(self) -> str:
        return repr(self._states())

    def __reduce__(self) -> Any:
        return _same, (self.own,)

    def _states(self) -> Any:
        """Those of all stages for user code, else this rank's."""
        shows = self.owner.shows and not in_backward()
        if not shows or user_of(sys._getframe(2)) is None:
            return self.own
        if self._all is None:
            self._all = self._learn()
        return self._all

    def _learn(self) -> dict[Any, Any]:
        owner = self.owner
        names = {p: name for p in self._parameters() if (name := owner.spread_name(p)) is not None}
        mine = {
            name: {key: tree_map(_told, x) for key, x in self.own[p].items()}
            for p, name in names.items()
            if owner.sources[name] == owner.axis.rank and isinstance(self.own.get(p), dict)
        }
        owner.meet(_DOING)
        told = {
            name: state for theirs in owner.axis.all_gather_object(mine, "optimizer") for name, state in theirs.items()
        }
        if owner.axis.dry and owner.alone.stepped:
            told |= self._told_alone(names)
        found: dict[Any, Any] = {}
        for p in self._parameters():
            name = names.get(p)
            if name is None and p in self.own:
                found[p] = self.own[p]
            elif name is not None and name in told:
                found[p] = _Entry(self, name, p, told[name])
        return found | {key: state for key, state in self.own.items() if key not in found}

    def _told_alone(self, names: Mapping[Tensor, str]) -> dict[str, dict[Any, Any]]:
        """What other ranks would tell, by the parameter's name, where none is there: after a step of the optimizer."""
        found = {}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self.owner.alone.state_of(self._optimizer, p, group) if is_elsewhere(p) and p in names else None
                if state:
                    found[names[p]] = {key: tree_map(_told, x) for key, x in state.items()}
        return found

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


class _Entry(dict[Any, Any]):
    """What is kept of one parameter, of which others have ``told``."""

    def __init__(self, states: JointState, name: str, parameter: Any, told: dict[Any, Any]) -> None:
        self._states, self._name, self._parameter, self._own = states, name, parameter, states.own.get(parameter)
        super().__init__({key: self._shown(x if self._own is None else self._own[key]) for key, x in told.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._states.changed = True
        value = self._states.owner.present("state", value, self._name)
        if self._own is not None:
            value = self._own[key] = map_tensors(_plain, value)
        else:
            value = tree_map(_told, value)
        super().__setitem__(key, self._shown(value))

    def __delitem__(self, key: Any) -> None:
        self._states.changed = True
        super().__delitem__(key)
        if self._own is not None:
            del self._own[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return MutableMapping.setdefault(self, key, default)  # type: ignore[arg-type]

    def update(self, *args: Any, **kwargs: Any) -> None:
        MutableMapping.update(self, *args, **kwargs)  # type: ignore[arg-type]

    def pop(self, key: Any, *default: Any) -> Any:
        return MutableMapping.pop(self, key, *default)  # type: ignore[arg-type]

    def popitem(self) -> tuple[Any, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        MutableMapping.clear(self)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _shown(self, value: Any) -> Any:
        """As user code sees it."""
        return tree_map(self._seen, value)

    def _seen(self, x: Any) -> Any:
        if isinstance(x, _Away):
            seen: Any = _HeldElsewhere(*x.kind, self._parameter.device, replace(self._parameter.origin))
        elif not isinstance(x, Tensor):
            return x
        else:
            seen = _plain(x)
        return self._states.owner.show(seen, self._name, object())


def _told(x: Any) -> Any:
    return _Away(kind_of(x)) if isinstance(x, Tensor) else x


def _plain(x: Tensor) -> Tensor:
    """The same memory, without ways of its own; of one in parts, this rank's part."""
    if isinstance(x, ShardedTensor):
        return x.with_local(x.local.detach())
    with DisableTorchFunctionSubclass():
        return x.detach()


def _same(x: Any) -> Any:
    return x
