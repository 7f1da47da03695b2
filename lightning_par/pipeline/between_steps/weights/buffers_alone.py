"""The values of buffers of a pipeline's other stages, where no other rank is there to tell them, as in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.pipeline.between_steps.weights.remote_weight import plain
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.trial.known_values import is_known


class BuffersAlone:
    """Follows what user code between steps writes into buffers that no step touches.

    Args:
        name_of: gives the name of the buffer that a tensor is; None where it is none itself.

    Attributes:
        values: by name, of those buffers as the run began.

    Example::

        alone = BuffersAlone(names.get)
        alone.values = {"average.n_averaged": torch.tensor(0)}
        assert alone.value(module.average.n_averaged) == 0
    """

    values: Mapping[str, Tensor]

    def __init__(self, name_of: Callable[[Tensor], str | None]) -> None:
        self._name_of = name_of
        self.values = {}

    def value(self, x: Any) -> Tensor | None:
        """What ``x`` holds where it is; None where that is not known."""
        name = self._name_of(x) if self.values else None
        if name is None or name not in self.values:
            return None
        found = self.values[name] if is_elsewhere(x) else plain(x)  # which user code has assigned on all ranks
        return found if not isinstance(found, FakeTensor) and is_known(found) else None

    def write(self, func: Any, written: Any, args: Any, kwargs: Any) -> None:
        """``func``, which writes into what is ``written`` and elsewhere, is called where that is."""
        there = [x for x in (written if isinstance(written, (list, tuple)) else [written]) if self.value(x) is not None]
        if not there:
            return
        lacking: list[Tensor] = []

        def known(x: Tensor) -> Tensor:
            value = self.value(x) if is_elsewhere(x) else x
            if value is None:
                lacking.append(x)
            return x if value is None else value

        given = map_tensors(known, (args, kwargs))
        if not lacking:
            func(*given[0], **given[1])
            return
        gone = {self._name_of(x) for x in there}
        self.values = {name: x for name, x in self.values.items() if name not in gone}
