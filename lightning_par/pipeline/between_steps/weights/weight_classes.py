"""The classes by which spread weights show user code what other ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.pipeline.between_steps.weights.remote_weight import WeightParameter, WeightView
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.user_classes import REMEMBERED, joined, set_class, set_classes, worn


class WeightClasses:
    """Puts weights into classes that ask ``owner``, and back.

    Args:
        owner: a `lightning_par.pipeline.between_steps.remote_reads.JointGradients`.
        weights: parameters that some ranks alone hold.
    """

    def __init__(self, owner: Any, weights: Sequence[Tensor]) -> None:
        self._owner, self._weights = owner, weights
        self._classes: dict[tuple[type, type], type] = {}
        self._plain: list[type] = []  # of the weights, where all have another class while they are shown
        self._shown: list[type] = []

    def show(self) -> None:
        """Let user code see the weights of all stages; whoever holds the objects has them still."""
        now = [*map(type, self._weights)]
        if self._plain and now == self._plain:  # as in nearly all steps, three times in each
            set_classes(self._weights, self._shown)
        elif not self._plain or now != self._shown:
            self._show_each(now)

    def hide(self) -> None:
        """Let them be what they were."""
        now = [*map(type, self._weights)]
        if self._plain and now == self._shown:
            set_classes(self._weights, self._plain)
        elif not self._plain or now != self._plain:
            self._hide_each()

    def _show_each(self, plain: list[type]) -> None:
        for before, now in zip(self._plain, plain):
            if issubclass(before, Elsewhere) and not issubclass(now, Elsewhere):
                raise NotImplementedError(
                    f"A step sets the `__class__` of a parameter to {now.__name__}, where another stage of the "
                    "pipeline has it. Set it between steps, as in on_train_batch_start, where it is set on all ranks."
                )
        for p in self._weights:
            if isinstance(p, ShardedTensor):  # other code asks for its very class
                p._lender = self._owner  # type: ignore[attr-defined]
            elif not isinstance(p, WeightParameter):
                set_class(p, self.class_of(WeightParameter, type(p)))
        shown = [*map(type, self._weights)]
        self._plain, self._shown = ([], []) if any(map(is_, plain, shown)) else (plain, shown)

    def _hide_each(self) -> None:
        for p in self._weights:
            vars(p).pop("_lender", None)
            if isinstance(p, WeightParameter):
                set_class(p, p._plain)

    def recast(self, x: Any, kind: type) -> None:
        """The user gives ``x``, which is shown, the class ``kind``."""
        way = WeightParameter if isinstance(x, WeightParameter) else WeightView
        if isinstance(x, Elsewhere):
            mark_parameter(x, issubclass(kind, nn.Parameter))
            kind = worn(Elsewhere, kind)
        set_class(x, self.class_of(way, kind))

    def class_of(self, way: type, kind: type) -> Any:
        """The subclass of ``kind`` that begins with ``way``."""
        if (way, kind) not in self._classes:
            content = {"_owner": self._owner, "_plain": kind, REMEMBERED: getattr(kind, REMEMBERED, kind)}
            self._classes[way, kind] = joined(way, kind, content)
        return self._classes[way, kind]
