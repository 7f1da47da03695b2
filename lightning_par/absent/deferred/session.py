"""One build of a module: the tensors that are alive in it, and the data that went into them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import Tensor

from lightning_par.absent.deferred.generator_draws import ScratchDraws
from lightning_par.absent.deferred.history import Constant
from lightning_par.private.modes import TorchDispatchMode


class Session(TorchDispatchMode):
    """Inside, functions of torch make deferred tensors, where they are large.

    Args:
        draws: whether random numbers of deferred tensors move the generators on. Without, other values may be drawn
            later than one device would, and nothing that has the size of a weight is drawn.

    Attributes:
        constants: the real tensors that went into deferred ones.
        adoption: of tensors in mapped files.
        scratch: memory to draw into.

    Example::

        with Session() as session:
            weight = torch.zeros(1000, 1000)
        assert session.alive()[0] is weight
    """

    current: Session | None = None

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        self.draws = draws
        from lightning_par.absent.deferred.adoption import Adoption

        self.constants: list[Constant] = []
        self.adoption = Adoption()
        self.scratch = ScratchDraws()
        self._tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._numbers = count()
        self._one_at_a_time = threading.RLock()

    def add(self, x: Tensor) -> None:
        """Know ``x`` as long as it lives."""
        self._tensors[next(self._numbers)] = x

    def alive(self) -> list[Tensor]:
        """The deferred tensors that something refers to; they are forgotten, since a weak reference keeps a tensor
        from turning into another."""
        found = list(self._tensors.values())
        self._tensors = weakref.WeakValueDictionary()
        return found

    def joined(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as another thread may run it: what that does is of the session, too, as long as it lasts."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if Session.current is not self:
                return function(*args, **kwargs)
            with _Joined(self):
                return function(*args, **kwargs)

        return run

    def __enter__(self) -> Session:
        super().__enter__()
        Session.current = self
        return self

    def __exit__(self, *exception: Any) -> None:
        Session.current = None
        self.scratch = ScratchDraws()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from lightning_par.absent.deferred.op_recorder import meet

        with self._one_at_a_time:
            return meet(func, args, kwargs or {}, self.adoption)


class _Joined(TorchDispatchMode):
    """A session in another thread than its own."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Session.current is not self.session:
            return func(*args, **(kwargs or {}))
        return self.session.__torch_dispatch__(func, types, args, kwargs)
