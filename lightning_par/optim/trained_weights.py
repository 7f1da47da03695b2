"""Which weights are trained: ranks that average gradients change it together, or learn of it before they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import STEP, Meeting
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import leaf

_ADVICE = (
    "Their messages of gradients would not fit one another. Let `requires_grad_` go by what all ranks have alike, such "
    "as trainer.global_step, or a value of `self.log(..., sync_dist=True)` or `self.all_gather`."
)
_MOST = 3  # names in a message
_trains = attrgetter("requires_grad")


class TrainedWeights:
    """Looks before each backward whether weights were frozen or unfrozen.

    Args:
        named: gives the parameters by name.
        axis: the ranks that average their gradients.

    Example::

        trained.agree()  # on all ranks, before each backward; they talk where something has changed alone
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, Tensor]]], axis: Axis) -> None:
        self._named, self._axis = named, axis
        self._known = self._now()
        self._meeting: Meeting | None = None

    def _now(self) -> list[bool]:
        return [_trains(leaf(p)) for _, p in self._named()]

    def agree(self) -> None:
        """All ranks must call it.

        Raises:
            RuntimeError: another rank did not change the same.
        """
        before, self._known = self._known, self._now()
        if self._known != before and not self._axis.dry:
            if self._meeting is None:
                self._meeting = Meeting(self._axis, None, "trained", "gradients are averaged")
            self._meeting.at_any_time(self._words(before), _ADVICE, patience=STEP)
        # one that waits there sees that this rank has gone on
        RunState.current.whereabouts.come("backward", self._axis.ranks, "came to a backward and had changed none")

    def _words(self, before: list[bool]) -> str:
        names = [name for name, _ in self._named()]
        if len(before) != len(self._known):
            return f"has {len(self._known)} parameters in place of {len(before)}"
        moved = [(name, now) for name, was, now in zip(names, before, self._known, strict=True) if was != now]
        told = [f"{name!r} {'trained' if now else 'frozen'}" for name, now in moved[:_MOST]]
        more = [f"{len(moved) - _MOST} more"] if len(moved) > _MOST else []
        return f"set {', '.join([*told, *more])}"
