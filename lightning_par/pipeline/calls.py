"""The torch functions that a piece of user code calls, so that two runs of it can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_par.pipeline.constants import constants_of
from lightning_par.pipeline.structure import tensors_in
from lightning_par.view import ShardedTensor

# Functions that follow the batch's size without using it: they lay values out anew, repeat one, or draw one a sample.
_SIZED = frozenset(
    """
view reshape unflatten expand broadcast_to repeat zeros ones empty full new_zeros new_ones new_empty new_full rand randn
""".split()
)


class Trace:
    """The torch functions that a unit called, what each was given, and where that came from.

    Args:
        inputs: whose places count, not which tensors they are.

    Example::

        x, y = torch.ones(2), torch.ones(2)
        first, second = Trace([x]), Trace([y])
        first.note(torch.add, (x, 1), {}, x + 1)
        second.note(torch.add, (y, 1), {}, y + 1)
        assert first.calls == second.calls
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self._known: dict[int, Any] = {id(x): ("given", n) for n, x in enumerate(inputs)}
        self._kept: list[Any] = [inputs]  # ids stay valid as long as the objects live

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """``func`` was called."""
        self.calls.append((func, tuple(self._name(x) for x in tree_leaves((args, kwargs)))))
        self._known.update((id(x), ("made", len(self.calls), n)) for n, x in enumerate(tensors_in(result)))
        self._kept.append((args, kwargs, result))

    def _name(self, value: Any) -> Any:
        if isinstance(value, (bool, int, str, type(None))):
            return value
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, (float, complex)) else str(value)
        if id(value) not in self._known:
            unknown = isinstance(value, (FakeTensor, ShardedTensor))
            self._known[id(value)] = ("other", id(value)) if unknown else constants_of(value, lambda _: False)
        return self._known[id(value)]

    def agrees(self, plain: Trace, samples: int, own: int) -> bool:
        """Whether ``plain``, which sees ``own`` of the ``samples``, computed the same but for sizes that follow."""
        return len(self.calls) == len(plain.calls) and all(
            func == other and len(given) == len(others) and all(
                a == b or _is_size(func, a) and _is_size(func, b) and a * own == b * samples
                for a, b in zip(given, others)
            )
            for (func, given), (other, others) in zip(self.calls, plain.calls)
        )  # fmt: skip


def _is_size(func: Any, value: Any) -> bool:
    return type(value) is int and getattr(func, "__name__", "") in _SIZED


class Traced(Protocol):
    """A run that notes in its trace, if it has one, what is called."""

    trace: Trace | None


@contextmanager
def tracing(run: Traced, inputs: list[Tensor]) -> Iterator[Trace]:
    """Let ``run`` note what is called inside; see `Trace`."""
    before, run.trace = run.trace, Trace(inputs)
    try:
        yield run.trace
    finally:
        run.trace = before
