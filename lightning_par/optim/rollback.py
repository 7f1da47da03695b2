"""What an optimizer was before a step, so that the step can be taken anew in another way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.absent.origin import ElsewhereError
from lightning_par.private.tensors import write_count
from lightning_par.python_state.generators import snapshot
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.tensor import OutOfSightError, leaf

_CONTAINERS = (dict, list, set, deque)
_OUT_OF_SIGHT = ("ShardedTensor", "Elsewhere", "TorchScript interpreter", "storage")
"""What is found in errors of compiled code that meets a tensor of which this rank has a part, or nothing."""


class Start:
    """Attributes, options, state and generators before a step. Tensors aren't copied: none may have been written to.

    Args:
        optimizers: one, and those that it wraps.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._attributes = [_copy_of(vars(one)) for one in optimizers]
        self._groups = [[dict(group) for group in one.param_groups] for one in optimizers]
        self._states = [_copy_of(one.state) for one in optimizers]
        self._put_back = snapshot(optimizers)
        self._results: list[tuple[Any, Callable[[], None]]] = []
        self._asked = 0
        self._note_versions()

    def remembered(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, the user's training step, which is not run anew when the optimizer's step is."""

        def call() -> Any:
            if self._asked == len(self._results):
                self._results.append((closure(), snapshot(self._optimizers)))
                self._note_versions()
            else:
                self._results[self._asked][1]()
            self._asked += 1
            return self._results[self._asked - 1][0]

        return call

    def is_written(self) -> bool:
        """Whether a parameter, a gradient or the state was written to."""
        return any(write_count(x) != version for x, version in self._versions)

    def restore(self) -> None:
        """Undo what the step did to Python's objects, and its draws."""
        self._asked = 0
        self._put_back()
        for one, attributes, groups, states in zip(self._optimizers, self._attributes, self._groups, self._states):
            for group, options in zip(one.param_groups, groups):
                _fill(group, options)
            _fill(one.state, states)
            for key in vars(one).keys() - attributes.keys():
                del vars(one)[key]
            for key, value in attributes.items():
                if key not in ("param_groups", "state"):
                    vars(one)[key] = _fill(vars(one).get(key), value)

    def _note_versions(self) -> None:
        parameters = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
        found: list[Tensor] = [x for p in parameters for x in (leaf(p), leaf(p).grad) if x is not None]
        found += [leaf(x) for one in self._optimizers for x in tensors_in([*one.state.values()])]
        self._versions = [(x, write_count(x)) for x in found]


def is_out_of_sight(error: BaseException) -> bool:
    """Whether ``error`` says that a tensor's part, not the tensor, met code that no mode of torch sees."""
    return isinstance(error, (OutOfSightError, ElsewhereError)) or any(text in str(error) for text in _OUT_OF_SIGHT)


def _copy_of(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: x.copy() if type(x) in _CONTAINERS else x for key, x in values.items()}


def _fill(now: Any, before: Any) -> Any:
    """``before``; where it is the copy of a container, in the container, which others may hold on to."""
    if now is before or type(now) is not type(before) or not isinstance(before, _CONTAINERS):
        return before
    now.clear()
    now.update(before) if isinstance(before, (dict, set)) else now.extend(before)
    return now
