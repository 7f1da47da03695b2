"""Parameters that share memory with other tensors on one device, before and after an optimizer writes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par import aliases
from lightning_par.optim.stand_ins import sharded_parameters
from lightning_par.view import ShardedTensor


class Shared:
    """The sharded parameters of an optimizer during a step of it; see `aliases`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._versions: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the optimizer writes."""
        self._look()
        try:
            yield
        finally:
            if aliases.is_any():
                aliases.written(self._parts())

    def away(self, closure: Callable[[], Any]) -> Any:
        """Run the ``closure``, in which it doesn't; few optimizers have written by then."""
        if aliases.is_any() and self._versions != self._versions_now():
            aliases.written(self._parts())
        result = closure()
        self._look()
        return result

    def _look(self) -> None:
        if aliases.is_any():
            aliases.look([*self._parts(), *gradients_of(sharded_parameters(self.optimizer))])
        self._versions = self._versions_now()

    def _parts(self) -> list[Tensor]:
        return [p._innermost for p in {id(p): p for p in sharded_parameters(self.optimizer)}.values()]

    def _versions_now(self) -> list[int]:
        return [x._version for x in self._parts()] if aliases.is_any() else []


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parts of the gradients of sharded ``parameters`` that are on this rank."""
    sharded = {id(p): p for p in parameters if isinstance(p, ShardedTensor)}.values()
    return [aliases.innermost(grad) for p in sharded if (grad := p.own_grad()) is not None]


def look_at_gradients(module: nn.Module) -> None:
    """To be called before a backward adds to them."""
    if aliases.is_any():
        aliases.look(gradients_of(module.parameters()))


def gradients_written(module: nn.Module) -> None:
    """To be called after a backward."""
    if aliases.is_any():
        aliases.written(gradients_of(module.parameters()))
