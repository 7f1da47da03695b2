"""Views of a tensor that all stages have, at a place that a value of the model tells, which one of them has.

``t[i] += 1`` is three functions: it takes such a view, writes into it, and assigns it to its own place. Of these the
assignment is followed, and of a copy it is the same. A write that no assignment follows is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.sharded.rules.lookup import user_line

_WRITES_INTO_PICKED = (
    "writes into a part of a tensor that all stages of the pipeline have. Which part goes by a value of the model, "
    "which one of them has. Write `t[i] += 1` or `t[i] = t[i] + 1` for `t[i].add_(1)`, and `t[i, j] = 1` for "
    "`t[i][j] = 1`, or use TensorParallelStrategy."
)


class _View(NamedTuple):
    """By which event it was taken, of what, and where; that is one of these where it was by ``t[i]``."""

    event: int
    of: Tensor
    places: tuple[Any, ...]


class Picked:
    """The views that a step takes so.

    Attributes:
        copied: events that give a copy of what they take, since it will be assigned.
    """

    def __init__(self) -> None:
        self.copied: list[int] = []
        self._views: dict[StorageWeakRef, _View] = {}  # the last one of each tensor
        self._written: tuple[_View, Tensor, str] | None = None  # what must be assigned next, and why
        self._stale: dict[StorageWeakRef, tuple[str, list[Any]]] = {}

    def note(self, memory: StorageWeakRef, event: int, of: Tensor, given: Sequence[Any]) -> None:
        """``event`` takes a view of a tensor, all of whose views have this ``memory``, by what else it is ``given``."""
        self._views[memory] = _View(event, of, tuple(given[1:]) if given and given[0] is of else ())

    def written(self, is_shared: Callable[[Tensor], bool], given: Sequence[Any], place: str) -> None:
        """A function that is ``given`` these writes at ``place`` into a tensor, which others ``is_shared`` with: views
        don't show that, but for one that is assigned."""
        self._stale.update({m: (place, [*given]) for m, view in self._views.items() if is_shared(view.of)})

    def stale_among(self, tensors: Iterable[Tensor]) -> str | None:
        """Where something was written into what one of ``tensors`` is a view of, and it does not show that."""
        for x in tensors if self._stale else ():
            memory = memory_reference(x)
            place, assigned = ("", []) if memory is None else self._stale.get(memory, ("", []))
            if place and not any(x is value for value in assigned):
                return place
        return None

    def about_to_write(self, name: str, target: Tensor, key: Key | None) -> None:
        """The function ``name`` is about to write into ``target``, a value of the model that an event made.

        Raises:
            NoScheduleError: that is a part of a view.
        """
        memory = memory_reference(target)
        view = None if memory is None else self._views.get(memory)
        if view is None:
            return
        place = f"{user_line()}: `{name}` {_WRITES_INTO_PICKED}"
        if name == "__setitem__" or key != (view.event, 0) or len(view.places) != 1:
            raise NoScheduleError(place)
        self._written = view, target, place

    def about_to_run(self, name: str, given: Sequence[Any]) -> None:
        """The function ``name``, or a module, or the end of the step, comes next, and is ``given`` these.

        Raises:
            NoScheduleError: a view was written into, and this does not assign it.
        """
        if self._written is None:
            return
        (view, value, why), self._written = self._written, None
        assigned = name == "__setitem__" and len(given) == 3 and given[0] is view.of and given[1] is view.places[0]
        if not assigned or given[2] is not value:
            raise NoScheduleError(why)
        self.copied.append(view.event)
