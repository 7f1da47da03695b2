"""The user's ``configure_model``, run so that no rank builds more than its own part of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning_par.absent.deferred.build import build
from lightning_par.python_state import generators
from lightning_par.strategies.ranks import RanksMixin


class BuildingMixin(RanksMixin):
    """Weights that are deferred from ``configure_model`` until the model is split."""

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Lightning enters it around ``configure_model``, which in here builds a module without its weights."""
        module = self.lightning_module
        # `Trainer.init_module` enters it, too, when there are no ranks yet. Where all ranks hold all weights there is
        # nothing to defer.
        splits = self._groups is not None and self.groups.tensor.size * self.groups.pipeline.size > 1
        splits = splits or self.stores_parts
        if module is None or not splits:
            yield
            return
        held = vars(module)
        before, configure = held.get("configure_model"), module.configure_model

        def configure_model(*args: Any, **kwargs: Any) -> Any:
            generators.share(self.groups.world)  # the user's hooks may have drawn on some ranks alone
            built = build(module, lambda: configure(*args, **kwargs))
            self._tell(built.warning())
            return built.result

        held["configure_model"] = configure_model
        try:
            yield
        finally:
            del held["configure_model"]
            if before is not None:
                held["configure_model"] = before

    def _tell(self, warning: str | None) -> None:
        """All ranks must call it; the first one warns."""
        told = self.groups.world.all_gather_object(warning, "weights")
        text = next((text for text in told if text is not None), None)
        if text is not None and self.groups.world.rank == 0:
            warnings.warn(text, stacklevel=2)
