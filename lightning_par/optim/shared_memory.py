"""Parameters that share memory with other tensors on one device, before and after an optimizer writes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.optim.stand_ins import sharded_parameters
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.tensors import write_count
from lightning_par.sharded import aliases
from lightning_par.sharded.rules.stored_weights import Gathering, gathering_of
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.known_values import times_written


class Shared:
    """The sharded parameters of an optimizer during a step of it; see `aliases`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._versions: list[int] = []
        self._rivals = Rivals([])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the optimizer writes."""
        self._look()
        try:
            yield
            self._rivals.refuse_several("the optimizer's step")
        except BaseException:
            self._tell_gathering([])
            raise
        finally:
            if aliases.is_any():
                aliases.written(self._parts())
        self._tell_gathering(self._stored())

    def away(self, closure: Callable[[], Any]) -> Any:
        """Run the ``closure``, in which it doesn't; few optimizers have written by then."""
        is_written = self._versions != self._versions_now()
        if aliases.is_any() and is_written:
            self._rivals.refuse_several("the optimizer's step")
            aliases.written(self._parts())
        self._tell_gathering(self._stored() if is_written else [])
        result = closure()
        self._look()
        return result

    def _stored(self) -> list[ShardedTensor]:
        return [p for p in sharded_parameters(self.optimizer) if p.axis.stores] if Gathering.count else []

    def _tell_gathering(self, written: list[ShardedTensor]) -> None:
        for x in self._stored()[:1]:
            gathering_of(x).end_optimizer_step(written)

    def _look(self) -> None:
        stored = self._stored()
        if stored:
            gathering_of(stored[0]).begin_optimizer_step(stored)
        if aliases.is_any():
            aliases.look([*self._parts(), *gradients_of(sharded_parameters(self.optimizer))])
            self._rivals = Rivals(self._parts())
        self._versions = self._versions_now()

    def _parts(self) -> list[Tensor]:
        return [p._innermost for p in {id(p): p for p in sharded_parameters(self.optimizer)}.values()]

    def _versions_now(self) -> list[int]:
        return [write_count(x) for x in self._parts()] if aliases.is_any() or Gathering.count else []


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parts of the gradients of sharded ``parameters`` that are on this rank."""
    sharded = {id(p): p for p in parameters if isinstance(p, ShardedTensor)}.values()
    return [aliases.innermost(grad) for p in sharded if (grad := p.own_grad()) is not None]


class Rivals:
    """Those of ``parts`` that share memory on one device, and here each have their own, split along another dim.

    What is written at once into several of them none would have.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        groups = aliases.overlapping(parts)
        self._before = [[(x, x.detach().clone(), times_written(x)) for x in group] for group in groups]

    def refuse_several(self, writer: str) -> None:
        """To be called after ``writer``.

        Raises:
            NotImplementedError: several that share memory were written.
        """
        for group in self._before:
            moved = [x for x, old, writes in group if _is_moved(x.detach(), old, writes)]
            if len(moved) > 1:
                shapes = " and ".join(str(tuple(x.shape)) for x in moved)
                raise NotImplementedError(
                    f"Two weights, or their gradients, were made one memory, as `a.data = b.data` does, and {writer} "
                    f"wrote into both. They are split along different dims, and have parts of shapes {shapes} on this "
                    "rank: neither would have what the other was given. Let one Parameter be both, or `clone()` it."
                )


def _is_moved(x: Tensor, old: Tensor, writes: int) -> bool:
    """Whether ``x`` is not as ``old``, or, in a dry run, into its memory more than so many ``writes`` went."""
    if isinstance(x, FakeTensor):
        return times_written(x) != writes
    return not torch.allclose(x, old, 0, 0, equal_nan=True)  # `torch.equal` takes no NaN for equal


def look_at_gradients(module: nn.Module) -> Rivals:
    """To be called before a backward adds to them."""
    if not aliases.is_any():
        return Rivals([])
    parts = gradients_of(module.parameters())
    aliases.look(parts)
    return Rivals(parts)


def gradients_written(module: nn.Module, rivals: Rivals | None) -> None:
    """To be called after a backward, with what `look_at_gradients` returned."""
    if aliases.is_any():
        if rivals is not None:
            rivals.refuse_several("the backward")
        aliases.written(gradients_of(module.parameters()))
