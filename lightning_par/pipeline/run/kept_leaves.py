"""Tensors that require a gradient and are kept by modules, beside the parameters that a run began with: their ``.grad``
is one device's.

So is that of parameters which user code registered since, as `remove_parametrizations` does between steps. All of them
are on all ranks, and what a stage's backward adds to one is a part of its gradient, as of a weight that all stages use.
So they are finished and delivered with the parameters' gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain, compress, islice, repeat
from operator import attrgetter, itemgetter, ne
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.pipeline.between_steps.weights.remote_weight import WeightView
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.run.tied_gradients import sum_over_holders
from lightning_par.private import lightning_modules
from lightning_par.private.dict_versions import version_of_dict
from lightning_par.private.modules import ModuleTree
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.lost_graphs import has_no_graph
from lightning_par.sharded.tensor import ShardedTensor, leaf

_CONTAINERS = (list, tuple, dict)
_KINDS = (Tensor, *_CONTAINERS)
_ITEMS = 1000  # of one attribute
_Holding = tuple[list[tuple[str, Tensor]], list[tuple[str, Any]]]


class KeptLeaves:
    """Finds such tensors, and sums their gradients over the ranks of the pipeline axis.

    Args:
        module: the LightningModule.
        axis: the pipeline axis.
        meeting: of its ranks.
        placed: whether the run began with a parameter, which may have had another name.

    Example::

        leaves = kept.found()  # before a step
        ...  # the step
        grads = kept.finish(grads)
        kept.refuse_others(memo)
    """

    def __init__(self, module: nn.Module, axis: Axis, meeting: Meeting, placed: Callable[[str], bool]) -> None:
        self._tree, self._axis, self._meeting, self._placed = ModuleTree(module), axis, meeting, placed
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._registered: dict[str, Tensor] = {}
        self._elsewhere: frozenset[tuple[str]] = frozenset()
        self._in_parts: frozenset[str] = frozenset()
        self._modules: list[tuple[str, nn.Module]] = []
        self._versions: list[int] = []
        self._held: dict[int, _Holding] = {}  # by the module's place, of those that hold any
        self._holding: list[_Holding] = []
        self._agreed: dict[frozenset[Any], frozenset[str]] = {frozenset(): frozenset()}
        self._step: dict[str, Tensor] = {}

    def found(self) -> dict[str, Tensor]:
        """Those that all ranks have, by name, for a step that is about to run. All ranks must call it."""
        there = self._there() | self._since_registered()
        # copies of a stage's weights are others' elsewhere: all ranks have to meet for them
        kinds = frozenset((name, tuple(x.shape), x.dtype) for name, x in there.items()) | self._elsewhere
        if kinds not in self._agreed:
            copies = {name for name, x in there.items() if isinstance(x, WeightView)} | self._in_parts
            self._agreed[kinds] = self._on_all(kinds) - (copies if self._axis.dry else set())  # else others tell so
        self._step = {name: x for name, x in there.items() if name in self._agreed[kinds]}
        return self._step

    @property
    def names(self) -> Collection[str]:
        """Of those that `found` gave last."""
        return self._step.keys()

    def _on_all(self, kinds: frozenset[Any]) -> frozenset[str]:
        doing = "came to a step whose module keeps other tensors that require a gradient than before"
        self._meeting.at_any_time(doing, "Make them on all of them, as in __init__ or on_fit_start.")
        told = self._axis.all_gather_object(kinds, "state of units")
        return frozenset(name for name, *_ in kinds.intersection(*told))

    def finish(self, grads: dict[Tensor, Tensor | None]) -> dict[Tensor, Tensor | None]:
        """``grads`` by leaf, those of such tensors summed over the ranks. All ranks must call it."""
        if not self._step:
            return grads
        everyone = tuple(range(self._axis.size))
        named = {name: grads.get(x) for name, x in sorted(self._step.items())}
        like = dict(sorted(self._step.items()))
        summed = sum_over_holders(named, Placement({}), {everyone: self._axis}, like)
        return {**grads, **{like[name]: grad for name, grad in summed.items()}}

    def refuse_others(self, memo: BatchValues) -> None:
        """Raises NotImplementedError where a step has given a gradient to one that was not there on all ranks.

        Args:
            memo: what the step made of the batch alone, of which what it has stored is a copy.
        """
        new = {name: x for name, x in self._there().items() if x is not self._step.get(name)}
        made = [x for x in tensors_in([*memo.results.values()]) if new and x.is_leaf and x.grad is not None]
        for name, x in new.items():
            if x.grad is not None or any(x.shape == y.shape and torch.equal(x, y) for y in made):
                raise NotImplementedError(
                    f"{name!r} requires a gradient and got one in the step in which it was made, of which each rank of "
                    "the pipeline has its own part. Make it before the step, as in __init__ or on_train_batch_start, "
                    "or use TensorParallelStrategy."
                )

    def _since_registered(self) -> dict[str, Tensor]:
        parameters = self._tree.parameters()
        if parameters is not self._parameters:
            new = {name: p for name, p in parameters if not self._placed(name)}
            self._elsewhere = frozenset((name,) for name, p in new.items() if is_elsewhere(p))
            # what is made in parts is a copy of a weight of this stage
            self._in_parts = frozenset(name for name, p in new.items() if isinstance(p, ShardedTensor))
            self._registered = {name: leaf(p) for name, p in new.items() if not is_elsewhere(p)}
            self._parameters = parameters
        return {name: x for name, x in self._registered.items() if x.requires_grad} if self._registered else {}

    def _there(self) -> dict[str, Tensor]:
        self._look_again()
        kept: dict[str, Tensor] = {}
        for held, containers in self._holding:
            nested = (one for name, x in containers for one in _tensors_in(name, x))
            kept.update((name, x) for name, x in chain(held, nested) if x.requires_grad and x.is_leaf)
        if not kept:
            return kept
        own = {id(p) for _, p in self._tree.parameters()}
        return {name: x for name, x in kept.items() if id(x) not in own and not has_no_graph(x)}

    def _look_again(self) -> None:
        """Note what modules hold which have been written to since: asked in every step."""
        modules = self._tree.modules()
        if modules is not self._modules:
            self._modules, self._held, self._versions = modules, {}, [-1] * len(modules)
        versions = [*map(version_of_dict, map(_attributes, map(itemgetter(1), modules)))]
        for place in compress(range(len(modules)), map(ne, versions, self._versions)):
            found = _held_by(*modules[place])
            self._held.pop(place, None)
            if any(found):
                self._held[place] = found
        self._versions, self._holding = versions, [*self._held.values()]


_OWN = lightning_modules.ATTRIBUTES | vars(nn.Module()).keys()
_attributes: Callable[[nn.Module], dict[str, Any]] = attrgetter("__dict__")


def _held_by(path: str, module: nn.Module) -> _Holding:
    """The tensors, and the containers, that are attributes of a module, with their names."""
    held = vars(module)
    items = compress(held.items(), map(isinstance, held.values(), repeat(_KINDS)))  # few, found in C
    found = [(f"self.{path}.{key}" if path else f"self.{key}", x) for key, x in items if key not in _OWN]
    nested = [one for one in found if type(one[1]) in _CONTAINERS and not _never_holds_any(one[1])]
    return [one for one in found if isinstance(one[1], Tensor)], nested


def _never_holds_any(container: Any) -> bool:
    """A tuple of numbers, as most layers have, can't come to hold a tensor."""
    return type(container) is tuple and not any(map(isinstance, container, repeat(_KINDS)))


def _tensors_in(name: str, held: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a container, and in those that it holds, among the `_ITEMS` that are met first: at each step."""
    waiting, left = deque([(name, held)]), _ITEMS
    while waiting and left > 0:
        name, held = waiting.popleft()
        keys, values = (held.keys(), held.values()) if isinstance(held, dict) else (range(len(held)), held)
        found = compress(zip(keys, values), map(isinstance, islice(values, left), repeat(_KINDS)))
        left -= len(held)
        for key, value in found:
            if isinstance(value, Tensor):
                yield f"{name}[{key!r}]", value
            elif type(value) in _CONTAINERS:
                waiting.append((f"{name}[{key!r}]", value))
