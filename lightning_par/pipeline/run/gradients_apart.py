"""The gradients that the backwards of a step leave in ``.grad``, apart from those that earlier steps left there.

On one device a layer's forward may look at what earlier batches of the window left in ``.grad``. So this is there in
each forward, and what the backwards of the step add to is there in these alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_

from torch import Tensor

from lightning_par.private.leaf_hooks import hooked, put_hooks, take_hooks
from lightning_par.private.tensors import write_count
from lightning_par.python_state.set_each import set_each
from lightning_par.sharded.run_state import RunState

_grad = attrgetter("grad")


class GradientsApart(contextlib.AbstractContextManager["GradientsApart"]):
    """Inside, parameters have no hooks, and in backwards only the gradients of these.

    Args:
        parameters: leaves.
        note: called with each parameter whenever a backward has added to its gradient.
        began: called with what was in ``.grad`` once this is put aside for the first time.
        cut: whether a forward runs once for each of several microbatches.
        stored: leaves beside ``parameters`` that have what earlier steps left, as parts of weights that these are.

    Example::

        with GradientsApart(parameters) as apart:
            ...  # a forward
            apart.in_backward()
            ...  # its backward
            apart.in_forward()
            ...  # another one
            grads = apart.found()
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        note: Callable[[Tensor], None] | None = None,
        began: Callable[[Sequence[Tensor | None]], None] | None = None,
        cut: bool = False,
        stored: Sequence[Tensor] = (),
    ) -> None:
        self._parameters, self._note, self._began, self._cut = parameters, note, began, cut
        self._stored = stored
        self._earlier: list[Tensor | None] = []
        self._own: list[Tensor | None] | None = None  # while a forward runs after a backward
        self._apart = self._begun = False
        self._state = RunState.current

    def __enter__(self) -> GradientsApart:
        # they run at delivery, once a step, not for each microbatch
        self._hooks = [held for _, p in hooked(enumerate(self._parameters)) for held in take_hooks(p)]
        note = self._note
        self._noted = [] if note is None else [p.register_post_accumulate_grad_hook(note) for p in self._parameters]
        self._note_first()
        return self

    def _note_first(self) -> None:
        self._first, self._settled = self._seen() if self._cut else None, self._state.settled

    def __exit__(self, *exception: object) -> None:
        for handle in self._noted:
            handle.remove()
        self.in_forward()
        put_hooks(self._hooks)

    def in_forward(self) -> None:
        """A forward may run from now on."""
        if self._apart:
            self._own = [*map(_grad, self._parameters)]
            set_each(self._parameters, "grad", self._earlier)
            self._apart = False

    def in_backward(self, looks: bool = True) -> None:
        """A backward may run from now on; ``looks`` whether to see what the forwards before it did to gradients."""
        if self._apart:
            return
        looks = looks and self._first is not None
        if looks and self._settled != self._state.settled:  # by a look, which changes none
            self._note_first()
        if looks and self._seen() != self._first:
            raise NotImplementedError(
                "A layer's forward or a hook on it changes the gradient that earlier batches left in a weight, and "
                "would do so once for each microbatch. Do it in on_before_zero_grad or on_train_batch_start, or set "
                "microbatches=1."
            )
        self._earlier = [*map(_grad, self._parameters)]
        set_each(self._parameters, "grad", repeat(None) if self._own is None else self._own)
        self._apart = True
        if not self._begun and self._began is not None:
            self._began(self._earlier)
        self._begun = True

    def found(self) -> list[Tensor | None]:
        """What the backwards have left."""
        self.in_backward()
        return [*map(_grad, self._parameters)]

    def _seen(self) -> list[tuple[int, int] | None]:
        """Which gradients are there, and how often they were written to."""
        grads = [*map(_grad, self._parameters), *map(_grad, self._stored)]
        if all(map(is_, grads, repeat(None))):  # in C: it is asked before each backward
            return []
        return [None if g is None else (id(g), write_count(g)) for g in grads]
