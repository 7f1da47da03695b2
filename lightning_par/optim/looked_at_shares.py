"""What user code sees of gradients of which each rank has a share: whole ones, or an error that says where to look."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.private.graph import in_backward
from lightning_par.sharded.patches import UNFINISHED
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState

_ADVICE = "Do it in code that all ranks run, and let one rank alone log the result."


class LookedAtShares:
    """Follows reads of ``.grad`` while gradients are shares.

    Args:
        axis: the ranks that have them.
        name: of a leaf of whose gradient they have shares; None of another tensor.
        settle: sums up what the batches of a window have left; all ranks call it.

    Example::

        shares.begin()  # a backward begins
        shares.end()  # gradients are whole
    """

    def __init__(self, axis: Axis, name: Callable[[Tensor], str | None], settle: Callable[[], None]) -> None:
        self._axis, self._name, self._settle = axis, name, settle
        self._meeting: Meeting | None = None
        self._state = RunState.current
        self._on = False

    def begin(self) -> None:
        if not self._on:
            self._on = True
            UNFINISHED.hold(self)
            self._state.looked_at = self._look

    def end(self) -> None:
        if self._on:
            self._on = False
            UNFINISHED.release(self)
            self._state.looked_at = None

    def meet(self) -> None:
        """The other ranks must look, too."""
        if self._meeting is None:
            self._meeting = Meeting(self._axis, None, "shares", "gradients are averaged")
        self._state.settled += 1
        self._meeting.at_any_time("looked at a gradient before all batches of its step had run", _ADVICE)

    def _look(self, leaf: Tensor | None) -> None:
        if not in_backward():
            self._settle()
            return
        name = None if leaf is None or leaf.grad is None else self._name(leaf)
        if name is not None:
            raise NotImplementedError(
                f"{user_line()}: a hook that runs within backward looks at the gradient of {name!r}, of which each of "
                f"the ranks {', '.join(map(str, self._axis.ranks))} has a share until backward has ended. Do it in "
                "on_after_backward or on_before_optimizer_step, or by `register_hook` of the weight, which meets the "
                "whole of it."
            )
