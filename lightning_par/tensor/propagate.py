"""What is split at a point of a recording, and what an event makes of it by the rules."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.functions import BY_ENTRY, PICKS, RESHAPES, WEIGHTED, writes
from lightning_par.sharded.rules import dispatch
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.tensor.symbolic_ranks import Book, Labels, NeedsGather, PlanAxis
from lightning_par.trial.recording import Event, Recording

log = logging.getLogger(__name__)


@dataclass
class Found:
    """How a parameter is split: which dim, by which labels, from which event on, and in which style."""

    dim: int
    labels: Labels
    event: int
    style: str


@dataclass
class Propagation:
    """The sharded values and split parameters so far, with what it takes to go back to an earlier event."""

    recording: Recording
    book: Book = field(default_factory=Book)
    axis: PlanAxis = field(default_factory=PlanAxis)
    found: dict[int, Found] = field(default_factory=dict)
    whole: dict[int, str] = field(default_factory=dict)  # parameters left whole, and why

    def __post_init__(self) -> None:
        self.parameters = {id(x): x for x in self.recording.parameters.values()}
        self.values: dict[int, ShardedTensor] = {}
        self.sources: dict[int, frozenset[int]] = {}  # which parameters' splits a sharded value comes from
        self.made: dict[int, tuple[int, tuple[Event, ...]]] = {}  # reshaped parameters: the root, and the events
        self.picked: set[int] = set()  # of those made by an index of tensors, as some experts' weights of all
        self.undo: list[tuple[int, Any]] = []
        self.marks: dict[int, int] = {}  # how many constraints there were before an event
        self.tainted = {id(x) for x in self.recording.batch}  # what depends on the batch
        self.made_at: dict[int, int] = {}  # the event that made a tensor

    def numel(self, parameters: Iterable[int]) -> int:
        return sum(self.parameters[key].numel() for key in parameters)

    def _taint(self, position: int, event: Event) -> None:
        self.made_at.update((id(x), position) for x in event.outputs)
        if any(id(x) in self.tainted for x in event.inputs):
            self.tainted.update(id(x) for x in event.outputs)

    def _is_split(self, x: Tensor) -> bool:
        return id(x) in self.values or id(x) in self.found or self._root(x) in self.found

    def _root(self, x: Tensor) -> int | None:
        if id(x) in self.parameters:
            return id(x)
        return self.made[id(x)][0] if id(x) in self.made else None

    def _parameter_operand(self, event: Event) -> int | None:
        """The parameter of a product, itself or reshaped; one of which some are picked by an index gives way, and one
        that a layer is applied to."""
        if event.name not in WEIGHTED:
            return None
        if event.name == "linear" and len(event.inputs) > 1 and (weight := self._root(event.inputs[1])) is not None:
            return weight
        found = [x for x in event.inputs if x.ndim > 1 and self._root(x) is not None]
        whole = [x for x in found if id(x) not in self.picked]
        roots = [self._root(x) for x in whole or found]
        return roots[0] if len(roots) == 1 else None

    def _replay(self, position: int, event: Event, opening: int | None) -> Any:
        """Run the event by its rules, with labels for what is split."""
        self.axis.cuts.clear()

        def value(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in self.values:
                return self.values[id(x)]
            root = self._root(x)
            if root not in self.found:
                return x
            return self._reshaped(x, root)

        args, kwargs = tree_map(value, (event.args, event.kwargs))
        if not any(isinstance(x, ShardedTensor) for x in tree_leaves((args, kwargs))):
            return event.result
        third = event.name.startswith(("linear", "conv")) and len(event.args) > 2
        bias = event.args[2] if third else event.kwargs.get("bias")
        bias = event.args[0] if event.name == "addmm" else bias
        if opening is not None and isinstance(bias, Tensor):
            args, kwargs = self._split_bias(position, event, bias, args, kwargs)
        try:
            result = dispatch(event.func, args, kwargs)
        except RuntimeError as error:  # of a rule that goes by values, which fakes have none of
            log.debug("`%s` at %s can't be tried on shards", event.name, event.place, exc_info=error)
            raise NeedsGather(event.func) from None
        if not all(map(_fits, tree_leaves(result), tree_leaves(event.result))):
            raise NeedsGather(event.func)
        return result

    def _split_bias(self, position: int, event: Event, bias: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The bias of a product is split as its outer dim is."""
        root = self._root(bias)
        if root is None or root in self.found or root in self.whole or self.parameters[root].ndim != 1:
            return args, kwargs
        weight = args[2] if event.name == "addmm" else args[1] if len(args) > 1 else kwargs["weight"]
        outer = 1 if event.name == "addmm" else 0  # addmm's weight is [in, out], that of linear [out, in]
        if not isinstance(weight, ShardedTensor) or weight._dim != outer:
            return args, kwargs
        self.found[root] = Found(0, self.book.fresh(self.parameters[root].shape[0]), position, "colwise")
        self.undo.append((position, ("found", root)))
        return tree_map(lambda x: self._reshaped(bias, root) if x is bias else x, (args, kwargs))

    def _split_cut(self, position: int, event: Event, result: Any, but: Container[int]) -> Any:
        """Split the vectors that an entry by entry function cuts, like what they meet; the result of that."""
        roots = dict.fromkeys(self._root(x) for x in self.axis.cuts) if event.name in BY_ENTRY else {}
        for root in roots:
            if root is None or root in self.found or root in self.whole or root in but:
                continue
            fake, cuts, mark = self.parameters[root], self.axis.cuts.copy(), len(self.book.constraints)
            for dim in [d for d in range(fake.ndim) if fake.shape[d] == fake.numel()]:
                self.found[root] = Found(dim, self.book.fresh(fake.shape[dim]), position, "colwise")
                with contextlib.suppress(NeedsGather):
                    again = self._replay(position, event, None)
                    if all(self._root(x) != root for x in self.axis.cuts):
                        self.undo.append((position, ("found", root)))
                        result = again
                        break
                del self.found[root], self.book.constraints[mark:]
                self.axis.cuts[:] = cuts
        return result

    def _reshaped(self, x: Tensor, root: int) -> ShardedTensor:
        """The split parameter ``root`` as it stands after the reshapes that made ``x`` of it."""
        found = self.found[root]
        value: Any = ShardedTensor(self.parameters[root], found.dim, found.labels, self.axis)
        made: dict[int, Any] = {root: value}
        for event in self.made[id(x)][1] if id(x) in self.made else ():
            args, kwargs = tree_map(lambda t: made.get(id(t), t), (event.args, event.kwargs))
            result = dispatch(event.func, args, kwargs)
            made.update(zip(map(id, event.outputs), tree_leaves(result), strict=True))
        result = made[id(x)]
        if not isinstance(result, ShardedTensor):
            raise NeedsGather(event.func)
        return result

    def _note_reshape(self, position: int, event: Event) -> None:
        """Keep what a plain event made of a parameter alone, entry by entry, or by picking entries of it."""
        roots = {root for x in event.inputs if (root := self._root(x)) is not None}
        picks = event.name in PICKS and len(event.inputs) > 1
        kept = event.name in RESHAPES or event.name in BY_ENTRY and not writes(event.name)
        if not kept or len(roots) != 1 or (len(event.inputs) != 1 and not picks):
            return
        source = event.inputs[0]
        if self._root(source) is None:
            return  # an index
        chain = self.made[id(source)][1] if id(source) in self.made else ()
        for out in event.outputs:
            if id(out) not in self.parameters and id(out) not in self.made:
                self.made[id(out)] = (roots.copy().pop(), (*chain, event))
                if picks or id(source) in self.picked:
                    self.picked.add(id(out))
                self.undo.append((position, ("made", id(out))))

    def _store(self, position: int, event: Event, result: Any) -> None:
        sources = frozenset().union(*(self.sources_of(x) for x in event.inputs))
        new = tree_leaves(result)
        for out, value in zip(event.outputs, [x for x in new if isinstance(x, Tensor)], strict=False):
            self.undo.append((position, ("value", id(out), self.values.get(id(out)), self.sources.get(id(out)))))
            self.values.pop(id(out), None)
            if isinstance(value, ShardedTensor):
                self.values[id(out)] = value
                self.sources[id(out)] = sources

    def sources_of(self, x: Tensor) -> frozenset[int]:
        if id(x) in self.values:
            return self.sources.get(id(x), frozenset())
        root = self._root(x)
        return frozenset([root]) if root in self.found else frozenset()

    def _rewind(self, position: int) -> None:
        """Forget all that came of the events from ``position`` on."""
        while self.undo and self.undo[-1][0] >= position:
            _, (kind, key, *old) = self.undo.pop()
            if kind == "value":
                self.values.pop(key, None)
                if old[0] is not None:
                    self.values[key], self.sources[key] = old
            elif kind == "found":
                self.found.pop(key, None)
            else:
                self.made.pop(key, None)
        del self.book.constraints[self.marks.get(position, 0) :]


def _fits(found: Any, recorded: Any) -> bool:
    """Whether a shard is one of what the step made; its size may go by values."""
    return not isinstance(found, ShardedTensor) or tuple(found.shape) == tuple(recorded.shape)
