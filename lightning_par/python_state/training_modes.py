"""Which modules train and which are in evaluation mode: a step may switch them, and switches all that are in one."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any

from torch import nn

from lightning_par.python_state.cells.names import NamesCell

_training = attrgetter("training")


class ModesCell(NamesCell):
    """``training`` of modules of which nothing else is watched, by their names.

    Example::

        modes = ModesCell({"a": module})
        module.eval()
        assert modes.change().entries == {"a": False}
        modes.restore()
        assert module.training
    """

    NAME = "the modes of modules"

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(self.NAME, modules, modules)
        self._modules = [*modules.values()]

    def counted(self) -> None:
        """None: each of the modules has a dict of its own."""

    def moved(self) -> bool:  # asked around every microbatch
        return not all(map(is_, map(_training, self._modules), self.values))

    def _get(self, name: str) -> Any:
        return self.owner[name].training

    def _put(self, key: Any, value: Any) -> None:
        self.owner[key].training = value
