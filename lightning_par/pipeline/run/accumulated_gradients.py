"""Gradients as hooks in the backwards of stages see them: added to what earlier backwards of the window left.

The backwards of a step run before Lightning calls backward, which alone adds to ``.grad``. A hook on a layer looks at
``weight.grad`` before, and on one device that holds what earlier backwards left. So these are there meanwhile, in a
copy; what the step adds is noted as it comes, and what hooks have written is told from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_par.private.tensors import write_count


class AccumulatedGradients:
    """Shows in ``.grad`` what is there on one device, and finds the gradient of one step again.

    Args:
        named: the leaves that get gradients, by name.

    Example::

        earlier = AccumulatedGradients(named)
        with GradientsApart([*named.values()], began=earlier.show):
            ...  # the forwards and backwards
            found = earlier.of_step()
        earlier.check()  # where the backward begins that delivers them
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._added: dict[str, Tensor] = {}

    def show(self, earlier: Sequence[Tensor | None]) -> None:
        """The backwards begin; the leaves have no gradient, and had the ``earlier`` ones."""
        self._earlier = {name: x for name, x in zip(self._named, earlier, strict=True) if x is not None}
        self._versions = {name: write_count(x) for name, x in self._earlier.items()}
        self._handles = []
        for name, x in self._earlier.items():
            p = self._named[name]
            p.grad = x.detach().clone()
            self._handles.append(p.register_hook(partial(self._note, name)))

    def _note(self, name: str, grad: Tensor) -> None:
        before = self._added.get(name)
        self._added[name] = grad.detach().clone() if before is None else before + grad.detach()

    def of_step(self) -> dict[Tensor, Tensor | None]:
        """The backwards have run: the gradients of the step alone, with what hooks have written into ``.grad``.

        Raises:
            NotImplementedError: a hook has taken a gradient away.
        """
        for handle in self._handles:
            handle.remove()
        return {p: self._of(name, p.grad) if name in self._earlier else p.grad for name, p in self._named.items()}

    def _of(self, name: str, now: Tensor | None) -> Tensor | None:
        earlier, added = self._earlier[name].detach(), self._added.get(name)
        if now is None:
            raise NotImplementedError(
                f"A hook that runs in backward sets the gradient of {name!r} to None, with what earlier batches "
                "accumulated in it. The ranks of a pipeline run their hooks before that. Write `.grad.zero_()`, or do "
                "it in on_after_backward."
            )
        now = now.detach()
        if added is not None and _same(now, earlier + added):
            return added
        return None if _same(now, earlier) else now - earlier

    def check(self) -> None:
        """The backward begins that delivers the gradients: what is there is what was shown.

        Raises:
            NotImplementedError: it is not.
        """
        for name, p in self._named.items():
            earlier = self._earlier.get(name)
            if p.grad is not earlier or earlier is not None and write_count(earlier) != self._versions[name]:
                raise NotImplementedError(
                    f"The gradient of {name!r} was changed between the step and its backward, as by "
                    "`optimizer_zero_grad` or in `on_before_backward`. Hooks on layers, which the ranks of a pipeline "
                    "run before that, have seen it as it was. Change it before the step or in on_after_backward, "
                    "remove the hooks, or use TensorParallelStrategy."
                )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.layout == b.layout is torch.strided and torch.equal(a, b)
