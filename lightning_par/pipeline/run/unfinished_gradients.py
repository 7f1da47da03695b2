"""Gradients that hooks in the backwards of stages can't see as on one device, since they are finished later.

A weight that several stages use has on one device no gradient of the step before the backward has gone through all of
them; here each rank has a part first, and their sum behind the schedule. And hooks on a weight, which may change its
gradient, run at delivery. Until the step's gradient comes to such a weight, what is there is one device's.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lightning_par.pipeline.between_steps.gradients.own_gradient import held_here, hold
from lightning_par.private.graph import in_backward
from lightning_par.private.tensors import write_count
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor, leaf
from lightning_par.sharded.user_classes import REMEMBERED, joined, set_class
from lightning_par.sharded.who_reads import is_inner
from lightning_par.trial.memo import Memo


class UnfinishedGradients:
    """Refuses hooks in backward that look at such a gradient too late, or write to it.

    Args:
        weights: by name, as user code has them.
        tied: the names of those that several stages use; the others have hooks of their own.

    Example::

        with UnfinishedGradients(weights, tied).watched():
            ...  # the backwards
    """

    def __init__(self, weights: Mapping[str, Tensor], tied: Collection[str]) -> None:
        self._weights, self._tied = weights, tied
        self._names = {id(p): name for name, p in weights.items()}
        self._come: set[str] = set()  # names of those to which the step's gradient has come
        self._versions: dict[str, int] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The backwards run inside, of which none has begun."""
        handles = []
        for name, p in self._weights.items():
            grad = leaf(p).grad
            if grad is not None:
                self._versions[name] = write_count(grad)
            handles.append(leaf(p).register_hook(partial(self._comes, name)))
            vars(p)["_lender"] = self
            if not isinstance(p, ShardedTensor):  # which asks without
                set_class(p, _lent[type(p)])
        try:
            yield
        finally:
            for p in self._weights.values():
                vars(p).pop("_lender", None)
                if not isinstance(p, ShardedTensor):
                    set_class(p, vars(type(p))["_plain"])
            for handle in handles:
                handle.remove()

    def _comes(self, name: str, _: Tensor) -> None:
        grad = leaf(self._weights[name]).grad
        first, written = name not in self._come, grad is not None and write_count(grad) != self._versions.get(name)
        self._come.add(name)
        if first and written and name in self._tied:
            self._refuse(name, "a hook that runs within backward writes to")

    def read(self, parameter: Tensor, frame: types.FrameType) -> Tensor | None:
        """``parameter.grad`` in the code of ``frame``."""
        name = self._names[id(parameter)]
        if name in self._come and in_backward() and not is_inner(frame):
            self._refuse(name, f"{user_line()}: a hook that runs within backward looks at")
        return held_here(parameter)

    def write(self, parameter: Tensor, value: Tensor | None, frame: types.FrameType) -> None:
        """``parameter.grad = value`` in the code of ``frame``."""
        if in_backward() and not is_inner(frame):
            self._refuse(self._names[id(parameter)], f"{user_line()}: a hook that runs within backward sets")
        hold(parameter, value)

    def _refuse(self, name: str, doing: str) -> None:
        why = "which several stages of the pipeline use" if name in self._tied else "which has hooks of its own"
        raise NotImplementedError(
            f"{doing} the gradient of {name!r}, {why}: it is finished only once all ranks' backwards have run. Do it "
            "in on_after_backward or on_before_optimizer_step, or use TensorParallelStrategy."
        )


class _Lent:
    """What the class of such a weight begins with."""

    @property
    def grad(self) -> Tensor | None:
        x: Any = self
        lender = vars(x).get("_lender")  # a copy has none
        return held_here(x) if lender is None else lender.read(x, sys._getframe(1))  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        x: Any = self
        lender = vars(x).get("_lender")
        if lender is None:
            hold(x, value)
        else:
            lender.write(x, value, sys._getframe(1))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _make_lent(kind: type[Tensor]) -> Any:
    return joined(_Lent, kind, {"_plain": kind, REMEMBERED: getattr(kind, REMEMBERED, kind)})


_lent = Memo(_make_lent)
