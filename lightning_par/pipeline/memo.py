"""What depends on the batch alone, in all the runs of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.located import Key
from lightning_par.pipeline.structure import tensors_in
from lightning_par.rules.table import writes


class Memo:
    """What depends on the batch alone: computed once a step, the same objects in every run of it.

    But a function that writes into a tensor of the module's, or returns a view of one, runs in every run of the step:
    each has copies of the module's tensors.
    """

    def __init__(self, batch: Any) -> None:
        self.results: dict[int, Any] = {}
        self.keys: dict[int, Key] = {id(x): (-1, n) for n, x in enumerate(tensors_in(batch))}
        self.anew: dict[int, Tensor | None] = {}  # events that run every time: where they write, the generator before
        self._views: dict[int, Any] = {}  # of the module's tensors, by id
        self._copies: dict[int, Tensor] = {}

    def compute(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The first run's result."""
        before = torch.get_rng_state() if writes(getattr(func, "__name__", "")) else None
        result = func(*args, **kwargs)
        if not touches_state(func, args, kwargs, result, self.is_state):
            return self.keep(event, result)
        self.anew[event] = before
        return self._state(event, result)

    def again(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an event in a later run."""
        if event not in self.anew:
            return self.results[event] if event in self.results else self.keep(event, func(*args, **kwargs))
        before, now = self.anew[event], torch.get_rng_state()
        if before is not None:
            torch.set_rng_state(before)
        try:
            return self._state(event, func(*args, **kwargs))
        finally:
            if before is not None:
                torch.set_rng_state(now)

    def _state(self, event: int, result: Any) -> Any:
        for n, x in enumerate(tensors_in(result)):
            self._views[id(x)] = x
            self.keys[id(x)] = (event, n)
        return result

    def copied(self, x: Tensor) -> Tensor | None:
        """The one copy of a tensor of the batch alone, None of others."""
        return None if self.is_state(x) else self._copies.setdefault(id(x), x.detach().clone())

    def is_state(self, x: Tensor) -> bool:
        """Whether the module held it before the step, or it is a view of such a tensor."""
        return id(x) not in self.keys or id(x) in self._views

    def keep(self, event: int, result: Any) -> Any:
        self.results[event] = result
        self.keys.update((id(x), (event, n)) for n, x in enumerate(tensors_in(result)))
        return result


def touches_state(func: Any, args: Any, kwargs: Any, result: Any, is_state: Callable[[Tensor], bool]) -> bool:
    """Whether a function of the batch alone writes into a tensor of the module's, or returns it or a view of it."""
    own = [x for x in tensors_in((args, kwargs)) if is_state(x)]
    if not own:
        return False
    if writes(getattr(func, "__name__", "")) and any(x is args[0] for x in own):
        return True
    storages = {x.untyped_storage().data_ptr() for x in own} - {0}
    return any(x.untyped_storage().data_ptr() in storages for x in tensors_in(result))
