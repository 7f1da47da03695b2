"""One thing of a model that is laid out over ranks: its tokens, its weights, its layers, what is stored of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis
    from lightning_par.sharded.patches import Patches
    from lightning_par.trial.first_step import FirstStep


class Part:
    """What a strategy does for one axis of the mesh, in one run of a Trainer's entry point.

    A strategy has them in order: first all plan, then each is applied to what those before it have left; every step
    runs in all of them; at the end of a run they let go, and are undone from the last to the first. All ranks call each
    method.
    """

    def axes(self) -> Sequence[Axis]:
        """Along which sharded tensors of this part talk."""
        return ()

    def patches(self) -> Sequence[Patches]:
        """What it needs of torch from `check` to the end of the run."""
        return ()

    def check(self, trainer: Any, module: nn.Module) -> None:
        """Refuse what can be seen without another rank, before any of them waits.

        Raises:
            ValueError: the module or a setting can't be laid out so.
        """

    def listen(self, first: FirstStep) -> None:
        """Say what is to listen to the trial run of ``first``, which another part may ask for."""

    def make_plan(self, first: FirstStep) -> None:
        """Plan on the whole module, as one device has it."""

    def apply(self, first: FirstStep) -> None:
        """Lay the module out, and say so in the start-up table."""

    def given(self, batch: Any) -> Any:
        """What a step is given for ``batch``."""
        return batch

    def step(self, kind: str) -> AbstractContextManager[Any]:
        """Around what all ranks run alike.

        Args:
            kind: "training_step", "evaluation", "backward" or "optimizer_step".
        """
        return nullcontext()

    def adopt(self, optimizer: Any) -> None:
        """An optimizer was made of the parameters, or has loaded its state."""

    def let_go(self) -> None:
        """After a run that ended well, before any part is undone: hold no weight, and no weak reference to one."""

    def undo(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        """After a run that ended well: put back what `apply` changed of ``module``, and what ``callbacks`` hold."""

    def close(self) -> None:
        """After any run. No communication: ranks may be gone."""
