"""The state of a run as one device writes and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_par import state
from lightning_par.optimizers import adopt
from lightning_par.strategy.ranks import RanksMixin


class SavingMixin(RanksMixin):
    """Weights and optimizer states, whole where they are saved."""

    @property
    def checkpoint_io(self) -> Any:
        """The user's plugin, else ours; a wrapping plugin of the user's is given ours to wrap."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._default_checkpoint_io()
        elif getattr(self._checkpoint_io, "checkpoint_io", self) is None:
            setattr(self._checkpoint_io, "checkpoint_io", self._default_checkpoint_io())  # noqa: B010
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def _default_checkpoint_io(self) -> Any:
        from lightning_par.checkpoint_io import make_checkpoint_io

        return make_checkpoint_io(self.namespace.pytorch)  # type: ignore[arg-type]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights as one device writes them."""
        self._meet_after_exception()
        weights = super().lightning_module_state_dict()
        return state.whole_model_state(weights, keep=self.is_global_zero, stages=self._stages)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one device writes it."""
        own = super().optimizer_state(optimizer)
        return state.whole_optimizer_state(optimizer, own, keep=self.is_global_zero, stages=self._stages)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._adopt_optimizers()  # the state is whole; one without hooks for loading has noticed nothing

    def _adopt_optimizers(self) -> None:
        """Called when ``self.optimizers`` were made by the user's ``configure_optimizers``."""
        for optimizer in self.optimizers:
            adopt(optimizer)
