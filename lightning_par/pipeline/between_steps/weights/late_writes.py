"""Writes into weights between a training step and its backward, as in `on_before_zero_grad`.

On one device that backward reads what they leave. Those of stages have run within the step, by the weights as they
were. Torch itself refuses a write that it counts where backward needs the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.between_steps.gradients.released_gradients import is_lightnings
from lightning_par.private.tensors import write_count
from lightning_par.sharded.tensor import leaf

_HOOKS = ("on_before_zero_grad", "on_before_backward")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LateWrites:
    """Of one training step, into the weights of this rank, by ways that torch does not count.

    Args:
        module: whose step it is.
        weights: by name.
        read: of weights of such names, those that its backward may read.

    Example::

        late = LateWrites(module, dict(module.named_parameters()), lambda names: names)
        late.refuse()
    """

    def __init__(self, module: Any, weights: Mapping[str, Tensor], read: Callable[[list[str]], list[str]]) -> None:
        self._read = read
        watchers = (module, *module.trainer.callbacks)
        methods = [module.optimizer_zero_grad, *(getattr(x, name) for x in watchers for name in _HOOKS)]
        weights = {} if all(map(is_lightnings, methods)) else weights
        self._names, self._weights = [*weights], [*map(leaf, weights.values())]
        self._counts, self._contents = self._now()

    def _now(self) -> tuple[list[int], Tensor | None]:
        contents = [_sum_of_words(x.detach()) for x in self._weights]
        return [*map(write_count, self._weights)], torch.stack(contents) if contents else None

    def refuse(self) -> None:
        """Called as the backward begins.

        Raises:
            RuntimeError: one was written into.
        """
        if self._contents is None:
            return
        counts, contents = self._now()
        assert contents is not None
        moved = (contents != self._contents).tolist()
        uncounted = (
            name
            for name, is_other, now, before in zip(self._names, moved, counts, self._counts, strict=True)
            if is_other and now == before
        )
        for name in self._read([*uncounted]):
            raise RuntimeError(
                f"{name!r} was written into through `.data` between the training step and its backward, as in "
                f"{' or '.join(_HOOKS)}: on one device the backward reads the new values, and those of the stages "
                "of a pipeline have run already. Write in on_train_batch_start or on_train_batch_end, or under "
                "torch.no_grad() without `.data`, where torch says whether the backward needs what was there."
            )


def _sum_of_words(x: Tensor) -> Tensor:
    """A number that another content would hardly have."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_WORDS[x.element_size()]).sum(dtype=torch.int64)
