"""Numbers of ranks as user code gets them where they go into results: ranks that share a model are one device to it."""

from __future__ import annotations

import sys
from typing import Any, cast

from lightning_par.strategies.namespace import Namespace

_HOOKS = frozenset(
    """
training_step validation_step test_step predict_step optimizer_step lr_scheduler_step configure_gradient_clipping
setup teardown configure_model configure_optimizers train_dataloader val_dataloader test_dataloader predict_dataloader
transfer_batch_to_device
""".split()
)
"""Beside those whose name begins with ``on_``."""

_OURS = ("lightning", "pytorch_lightning", "lightning_par")


class Count(int):
    """A rank or a number of ranks: compared and printed it is that of processes, computed with that of replicas.

    So code that shares out data, as ``x[rank::world_size]``, or scales a learning rate gives one device's results, and
    one that acts on a certain process alone, as ``if rank == 0``, still does.

    Args:
        replicas: the number to compute with.
        processes: the number to compare with.

    Example::

        rank, world_size = Count(0, processes=1), Count(1, processes=2)
        assert rank == 1 and world_size == 2
        assert [3, 4, 5][rank::world_size] == [3, 4, 5] and 0.1 * world_size == 0.1
    """

    processes: int

    def __new__(cls, replicas: int, processes: int) -> Count:
        self = super().__new__(cls, replicas)
        self.processes = processes
        return self

    def beside(self, other: Any, equal: bool = False) -> int:
        """As which number it is compared with ``other``, and whether by ``==`` and ``!=``."""
        return self.processes

    def __eq__(self, other: object) -> Any:
        return self.beside(other, True) == _beside(other, self, True)

    def __ne__(self, other: object) -> Any:
        return self.beside(other, True) != _beside(other, self, True)

    def __lt__(self, other: Any) -> Any:
        return self.beside(other) < _beside(other, self)

    def __le__(self, other: Any) -> Any:
        return self.beside(other) <= _beside(other, self)

    def __gt__(self, other: Any) -> Any:
        return self.beside(other) > _beside(other, self)

    def __ge__(self, other: Any) -> Any:
        return self.beside(other) >= _beside(other, self)

    def __hash__(self) -> int:
        return hash(self.processes)

    def __bool__(self) -> bool:
        return bool(self.processes)

    def __repr__(self) -> str:
        return repr(self.processes)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.processes, spec)

    def __reduce__(self) -> Any:  # a dataset that has it is copied, and travels to workers
        return Count, (int(self), self.processes)


class RankInStep(Count):
    """A rank within a step that all ranks of a replica run alike: it is the replica's first one, and itself.

    So what a user does on rank 0 alone, all of the replica do, as one device does; and what on rank 1, that one.

    Args:
        replicas: the number to compute with.
        processes: the number of the replica's first process.
        own: of this process.

    Example::

        assert RankInStep(0, 0, own=1) == 0 and RankInStep(0, 0, own=1) == 1 and not RankInStep(0, 0, own=1)
    """

    own: int

    def __new__(cls, replicas: int, processes: int, own: int) -> RankInStep:
        self = cast(RankInStep, super().__new__(cls, replicas, processes))
        self.own = own
        return self

    def beside(self, other: Any, equal: bool = False) -> int:
        return self.own if equal and _processes(other) == self.own else self.processes


class CopyRank(Count):
    """A rank as `torch.distributed` tells it in a step: that of the copy of the model, to which collectives go.

    It is compared as that number, as where code leaves its own features out of those that it gathered, with all numbers
    that are a copy's; beyond them as the process's, which ``if rank == 3: raise`` may mean. So the ranks that share a
    copy go the same way. Printed, or compared with another rank, it is the process's.

    Args:
        replicas: of the copy.
        processes: of this process.
        copies: how many there are.

    Example::

        rank = CopyRank(1, processes=3, copies=2)
        assert rank == 1 and rank == 3 and rank != 0 and rank + 4 == 5
        assert CopyRank(0, processes=1, copies=2) != 1 and 0 <= rank < 2
        assert CopyRank(0, processes=1, copies=1) == 1
    """

    copies: int

    def __new__(cls, replicas: int, processes: int, copies: int) -> CopyRank:
        self = cast(CopyRank, super().__new__(cls, replicas, processes))
        self.copies = copies
        return self

    def beside(self, other: Any, equal: bool = False) -> int:
        if isinstance(other, int | float) and not isinstance(other, Count):
            of_copy = other < self.copies or other == self.copies and not equal  # as in `rank < world_size`
            return int(self) if of_copy else self.processes
        return self.processes if isinstance(other, Count) else int(self)  # a tensor compares its entries

    def __bool__(self) -> bool:
        return int(self) != 0

    def __hash__(self) -> int:
        return hash(int(self))

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _beside(value: Any, other: Count, equal: bool = False) -> Any:
    return value.beside(other, equal) if isinstance(value, Count) else value


def _processes(value: Any) -> Any:
    return value.processes if isinstance(value, Count) else value


def in_users_hook(namespace: Namespace) -> bool:
    """Whether a hook of a LightningModule, LightningDataModule or Callback is running that the user wrote.

    It is read from the stack, since Lightning tells a strategy of some hooks only, and of none that makes data. The
    hooks of Lightning's own callbacks count processes.
    """
    modules = (("core", "LightningModule"), ("core", "LightningDataModule"), ("callbacks", "Callback"))
    owners = tuple(namespace.from_pytorch(*name) for name in modules)
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_hook = code.co_name.startswith("on_") or code.co_name in _HOOKS
        if is_hook and code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), owners):
            return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS
        frame = frame.f_back  # type: ignore[assignment]
    return False
