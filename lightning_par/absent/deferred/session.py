"""One build of a module: the tensors that are alive in it, and the data that went into them."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

from torch import Tensor

from lightning_par.absent.deferred.generator_draws import ScratchDraws
from lightning_par.absent.deferred.history import Constant
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.pytree import tree_leaves


class Session(TorchDispatchMode):
    """Inside, functions of torch make deferred tensors, where they are large.

    Attributes:
        constants: the real tensors that went into deferred ones.
        scratch: memory to draw into.

    Example::

        with Session() as session:
            weight = torch.zeros(1000, 1000)
        assert session.alive()[0] is weight
    """

    current: Session | None = None

    def __init__(self) -> None:
        super().__init__()
        self.constants: list[Constant] = []
        self.scratch = ScratchDraws()
        self._tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._numbers = count()

    def add(self, x: Tensor) -> None:
        """Know ``x`` as long as it lives."""
        self._tensors[next(self._numbers)] = x

    def alive(self) -> list[Tensor]:
        """The deferred tensors that something refers to; they are forgotten, since a weak reference keeps a tensor
        from turning into another."""
        found = list(self._tensors.values())
        self._tensors = weakref.WeakValueDictionary()
        return found

    def __enter__(self) -> Session:
        super().__enter__()
        Session.current = self
        return self

    def __exit__(self, *exception: Any) -> None:
        Session.current = None
        self.scratch = ScratchDraws()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from lightning_par.absent.deferred.deferred_tensor import is_deferred
        from lightning_par.absent.deferred.op_recorder import make, record

        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(map(is_deferred, tensors)):
            return record(func, args, kwargs)
        return func(*args, **kwargs) if tensors else make(func, args, kwargs)
