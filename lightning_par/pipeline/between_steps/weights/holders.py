"""Which ranks of a pipeline hold a tensor that is no weight, where user code writes weights into it."""

from __future__ import annotations

import weakref

from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.axis import Axis


class Holders:
    """Asks the ranks who holds a tensor, once.

    Args:
        axis: the pipeline axis.

    Example::

        holders = Holders(groups.pipeline)
        ranks = holders.known(x) or holders.ask(x)
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._noted: dict[int, tuple[weakref.ref[Tensor], frozenset[int]]] = {}

    def known(self, x: Tensor) -> frozenset[int] | None:
        """The ranks that hold ``x``; None where they were not asked."""
        noted = self._noted.get(id(x))
        return noted[1] if noted is not None and noted[0]() is x else None

    def ask(self, x: Tensor) -> frozenset[int]:
        """The ranks that hold ``x``. All ranks must call it, once they have met."""
        away = self._axis.all_gather_object(is_elsewhere(x), "weights")
        ranks = frozenset(rank for rank, elsewhere in enumerate(away) if not elsewhere)
        key = id(x)  # what a tensor compares by is no key
        self._noted[key] = weakref.ref(x, lambda _: self._noted.pop(key, None)), ranks
        return ranks
