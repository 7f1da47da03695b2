"""Which gradients and states of optimizers other ranks of a pipeline have, where none is there, as in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.pipeline.between_steps.gradients.own_gradient import held_here

StateOf = Callable[[Any, Any, Mapping[str, Any]], Mapping[Any, Any] | None]


class GradientsAlone:
    """Others are taken to have theirs where this rank has, but for those that all have dropped since.

    Args:
        parameters: that some ranks alone hold, by name.

    Attributes:
        expected: the first names of the parameters that get a gradient; None where that is not known.
        stepped: whether the optimizers have made a step.
        state_of: what an optimizer keeps of a parameter after one, of a group; None where that is not known.

    Example::

        alone = GradientsAlone(dict(module.named_parameters()))
        alone.come()
        assert "head.weight" in alone.names()
    """

    expected: Collection[str] | None = None
    stepped = False
    state_of: StateOf = staticmethod(lambda *_: None)

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._come = False  # whether a backward has begun
        self._dropped: set[str] = set()

    def come(self) -> None:
        """A backward begins that gives parameters gradients."""
        self._come = True
        self._dropped.clear()

    def drop(self, names: Iterable[str]) -> None:
        """All ranks drop the gradients of these."""
        self._dropped.update(names)

    def put(self, name: str) -> None:
        """All ranks set the gradient of this one."""
        self._dropped.discard(name)

    def names(self) -> set[str]:
        """The parameters that have a gradient, on any rank."""
        return self._trained() - self._dropped if self.are_there() else set()

    def are_there(self) -> bool:
        """Whether other ranks have gradients: where this one has some, or, if it trains nothing, from a backward on."""
        here = [p for name in self._trained() if not is_elsewhere(p := self._parameters[name])]
        return any(held_here(p) is not None for p in here) if here else self._come

    def _trained(self) -> set[str]:
        names = {name for name, p in self._parameters.items() if p.requires_grad}
        return names if self.expected is None else names & {*self.expected}
