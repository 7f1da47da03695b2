"""Tensors that depend on the batch alone, once modules were given them: they can't be written into any more.

What depends on the batch alone is computed before any module runs, on every rank; modules run on some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.private.transforms import in_functorch
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import writes_into
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor


class Lent:
    """Refuses writes whose order would be lost.

    Example::

        lent = Lent()
        lent.give([x])
        lent.about_to_run(torch.Tensor.mul_, "mul_", (x, 2), {})  # raises
    """

    def __init__(self) -> None:
        self._given: set[StorageWeakRef] = set()
        self._written: set[StorageWeakRef] = set()

    def give(self, tensors: Iterable[Tensor], written: Collection[StorageWeakRef] = ()) -> None:
        """A function of the model was given ``tensors`` of the batch alone, and wrote into memory."""
        memory = {found for x in tensors if (found := memory_reference(x)) is not None}
        self._given |= memory
        self._written |= memory.intersection(written)

    def about_to_run(self, name: str, args: Any, kwargs: Any) -> None:
        """A function of the batch alone is about to run.

        Raises:
            NoScheduleError: it writes into what a module was given before, or reads what a module wrote.
        """
        self.about_to_take(tensors_in((args, kwargs)))
        into = [kwargs.get("out")] if "out" in kwargs else list(args[:1])
        if not (writes_into(name) or kwargs.get("inplace") is True or "out" in kwargs):
            return
        if any(memory_reference(x) in self._given for x in tensors_in(into)):
            raise NoScheduleError(
                f"{user_line()}: `{name}` writes into a tensor that a module was given before, or that was logged. "
                "Over several ranks such tensors are computed first of all. Write the function that returns a new one, "
                "e.g. `x = x + 1` for `x += 1`."
            )

    def about_to_take(self, tensors: Iterable[Tensor]) -> None:
        """Something takes ``tensors`` of the batch alone.

        Raises:
            NoScheduleError: a module wrote into one of them.
        """
        if self._written and any(memory_reference(x) in self._written for x in tensors):
            raise NoScheduleError(
                f"{user_line()}: a tensor is used here into which a module wrote in place, on the rank that it is on. "
                "Let the module work on a copy: `x = x.clone()` before it writes."
            )


def memory_reference(x: Tensor) -> StorageWeakRef | None:
    """What says whether two tensors share memory; None for tensors that are not strided, or a transform's."""
    x = x.local if isinstance(x, ShardedTensor) else x
    if x.layout != torch.strided or in_functorch():
        return None
    return StorageWeakRef(x.untyped_storage())
