"""Copies of weights in the precision of products: one for all microbatches of a step.

Autocast copies a weight for each product, and backward needs the copy, so that a stage would hold one of all its
weights for each microbatch under way. Its own cache, which Lightning turns off, keeps copies until the outermost
context ends: here that is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.tensors import write_count


class WeightCasts:
    """The precision of one step.

    Args:
        kind: of the device.
        context: of the precision plugin, around each run of the step.

    Example::

        casts = WeightCasts("cpu", plugin.forward_context)
        with casts.kept({"weight": weight}):
            for part in batch.chunk(4):
                with casts.context():
                    losses.append(F.linear(part, weight).sum())
    """

    def __init__(self, kind: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.kind = kind
        self._context, self._keeps = context, False
        with context():
            self.lowers = torch.is_autocast_enabled(kind)
            """Whether products run in low precision."""

    @contextmanager
    def context(self) -> Iterator[None]:
        """Around a run of the step: the plugin's, in which copies are looked up where they are kept."""
        with self._context(), self._autocast(True, cache=True) if self._keeps else nullcontext():
            yield

    @contextmanager
    def kept(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Around runs and backwards: what was copied is there for all of them.

        Args:
            weights: by name.

        Raises:
            RuntimeError: something was written into one of them meanwhile.
        """
        versions = {name: write_count(x) for name, x in weights.items()}
        # Copies go where the outermost context ends. This one changes nothing, but that no run's is the outermost; nor
        # may it be itself, as where the user's own is around the whole fit.
        with self._autocast(torch.is_autocast_enabled(self.kind), torch.is_autocast_cache_enabled()):
            torch.clear_autocast_cache()
            self._keeps = True
            try:
                yield
            finally:
                self._keeps = False
                torch.clear_autocast_cache()
        _check_unwritten(weights, versions)

    def _autocast(self, enabled: bool, cache: bool) -> AbstractContextManager[Any]:
        dtype = torch.get_autocast_dtype(self.kind)
        return torch.autocast(self.kind, dtype=dtype, enabled=enabled, cache_enabled=cache)


def _check_unwritten(weights: Mapping[str, Tensor], versions: dict[str, int]) -> None:
    written = [name for name, x in weights.items() if write_count(x) != versions[name]]
    if written:
        raise RuntimeError(
            f"{written[0]!r} was written into by a training step whose microbatches share its copy in low precision. "
            "The run of the step that was looked at wrote into none. Write into it between steps, as in "
            "on_train_batch_start, or use precision='bf16-true' or microbatches=1."
        )
