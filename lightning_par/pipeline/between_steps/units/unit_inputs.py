"""What a unit that runs outside of a step is given and computes with, as the ends of the graph that it makes there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.between_steps.graphs.unit_graph import innermost, with_innermost
from lightning_par.private.graph import node_of
from lightning_par.python_state.tensor_writes import version_of
from lightning_par.sharded.tensor import ShardedTensor

_KINDS = (Tensor, torch.nn.Parameter, ShardedTensor)


class UnitInputs:
    """Tensors by the names that ranks share. A unit is run with others in their place, so that its graph ends there.

    Args:
        tensors: what it is given, in the graph of all ranks, by name.
        weights: the unit's.
        end: gives the end of that graph which stands for a weight.
        here: whether the unit runs here.

    Attributes:
        held: gives what code in the unit reaches, and all ranks have, by name.
        leaves: the ends of the unit's own graph by name, where it runs.
        standing: the names of what stands for ``tensors`` there, by id.

    Example::

        inputs = UnitInputs({"x": x}, [*layer.parameters()], WeightEnds(gradients).of, here=True)
        args = inputs.lend((x,))
        y = layer(*args)
        inputs.put_back()
        torch.autograd.grad(y.sum(), inputs.leaves["x"])
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        weights: Sequence[Tensor],
        end: Callable[[Tensor], Tensor],
        here: bool,
    ) -> None:
        self._tensors, self.weights, self._end = dict(tensors), weights, end
        self.held: Callable[[], Mapping[str, Any]] = dict
        self.leaves: dict[str, Tensor] = {f"weight {n}": end(x) for n, x in enumerate(weights)} if here else {}
        self.standing: dict[int, str] = {}
        self._leaf_names: dict[int, str] = {}
        self._names = {id(x): name for name, x in self._tensors.items()}
        self._stands: dict[str, tuple[Tensor, int]] = {}
        self._lent: list[tuple[Any, list[tuple[Any, Any]]]] = []  # objects of the user's, and what they held

    def __getitem__(self, name: str) -> Tensor:
        weight = self.weight(name)
        if weight is not None:
            return self._end(weight)
        if name in self._tensors:
            found = innermost(self._tensors[name])
        else:
            found = self._end(self.held()[name])
        return found if found.requires_grad else found.requires_grad_()  # as it is where the unit has run

    def weight(self, name: str) -> Any:
        """The weight of this name; None where it is another input's."""
        kind, _, number = name.partition(" ")
        return self.weights[int(number)] if kind == "weight" else None

    def name_of(self, leaf: Tensor, known: Callable[[Tensor], str | None]) -> str | None:
        """The name of an end of the unit's own graph, where it runs; None where it is no input.

        Args:
            leaf: the end.
            known: gives the names of what all ranks have.
        """
        if not self._leaf_names:
            self._leaf_names = {id(x): name for name, x in self.leaves.items()}
        name = self._leaf_names.get(id(leaf)) or known(leaf)
        if name is not None:
            self.leaves[name] = leaf
        return name

    @property
    def count(self) -> int:
        """How many tensors it is given."""
        return len(self._tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that it is given."""
        return [*self._tensors.values()]

    def given(self) -> list[Tensor]:
        """The tensors that it is given, and its weights, as far as they require a gradient."""
        return [x for x in (*map(innermost, self._tensors.values()), *map(self._end, self.weights)) if x.requires_grad]

    def beside(self, tensors: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> UnitInputs:
        """With more of them: the gradients with which a backward begins.

        Args:
            tensors: in the graph of all ranks, by name.
            leaves: the ends of the unit's own graph for these, where it runs.
        """
        more = UnitInputs({**self._tensors, **tensors}, self.weights, self._end, here=False)
        more.held = self.held
        more.leaves = {**self.leaves, **leaves}
        return more

    # ------------------------------------------------------------------------------------------- where the unit runs

    def lend(self, value: Any) -> Any:
        """Arguments with what stands for their tensors; the user's lists, dicts and dataclasses hold that until
        `put_back`. What other objects hold stays there."""
        if isinstance(value, Tensor):
            return self._standing(value)
        if isinstance(value, tuple):
            items = [self.lend(x) for x in value]
            return value if all(a is b for a, b in zip(value, items)) else tuple.__new__(type(value), items)
        places = [*_places(value)]
        if places and not any(value is x for x, _ in self._lent):
            self._lent.append((value, places))
            for key, x in places:
                y = self.lend(x)
                if y is not x:
                    _put(value, key, y)
        return value

    def put_back(self) -> None:
        """Let the user's objects hold what they did, where the unit has left that in them."""
        for value, before in self._lent:
            held = dict(before)
            for key, x in [*_places(value)]:
                name = self.standing.get(id(x))
                if name is not None:
                    _put(value, key, self._tensors[name])
                elif key in held and x is not held[key] and isinstance(x, tuple) and isinstance(held[key], tuple):
                    _put(value, key, self._as_before(x, held[key]))
        self._lent = []

    def _as_before(self, x: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
        """``before`` itself, where ``x`` stands for it."""
        same = len(x) == len(before) and all(
            a is b or self.standing.get(id(a)) == self._names.get(id(b), "") for a, b in zip(x, before)
        )
        return before if same else x

    def _standing(self, x: Tensor) -> Tensor:
        name = self._names.get(id(x))
        plain = innermost(x)
        if name is None or type(x) not in _KINDS or not plain.requires_grad:
            return x
        if name not in self._stands:
            self._stands[name] = self._stand_for(name, plain)
            stand = with_innermost(x, self._stands[name][0])
            self.standing[id(stand)] = name
            self._stands[name] = stand, self._stands[name][1]
        return self._stands[name][0]

    def _stand_for(self, name: str, x: Tensor) -> tuple[Tensor, int]:
        """In the memory of ``x``; it may be written into as that may."""
        if node_of(x) is None:
            leaf = stand = x.detach().requires_grad_()
        else:
            leaf = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape).requires_grad_()
            with torch.enable_grad():
                stand = _End.apply([x.detach()], leaf)
        self.leaves[name] = leaf
        return stand, version_of(stand)

    def rewritten(self, name: str) -> Tensor | None:
        """What the unit has written into what it was given, where that is in its graph."""
        stand, version = self._stands.get(name, (None, 0))
        plain = None if stand is None else innermost(stand)
        return None if plain is None or version_of(plain) == version else plain.view_as(plain)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boxed: list[Tensor], leaf: Tensor) -> Tensor:
        return boxed[0]  # in a list it is no input, of which the result would be a view that can't be written into

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a list, dict or dataclass holds, by where."""
    if isinstance(value, list):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name))


def _put(value: Any, key: Any, x: Any) -> None:
    if isinstance(value, (list, dict)):
        value[key] = x
    else:
        object.__setattr__(value, key, x)
