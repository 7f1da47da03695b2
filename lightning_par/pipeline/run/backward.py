"""The backward of one microbatch on one stage: whole, or in two parts of about half the work each.

A zero-bubble schedule sends the inputs' gradients on first and fills later gaps with the weights' gradients. Autograd
runs a node only as far as what is asked for needs, so the first part is a backward that asks for the inputs alone. On
its way it notes the gradients that arrive at the *feeders*: nodes on the inputs' path with an edge to a weight beside
it, as a matrix product. The second part starts at the feeders, and asks for the weights alone: nothing on the inputs'
path between feeders runs again.

From a feeder that leads to another one of the same weight (one used twice in a row) there is no such start; that
weight's gradient belongs to the first part. So does that of a weight that a custom autograd function reads, whose
backward computes all its gradients at every call, and may not be made for two calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

Grads = tuple[Tensor | None, ...]


def backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Grads:
    """The whole backward: gradients of parameters are accumulated in their ``.grad``, those of ``inputs`` returned.

    Args:
        outputs: each requires a gradient.
        grads: the gradient of each output; None for a loss of one element.
        inputs: leaves.

    Returns:
        One gradient for each input, None where none arrived; the inputs keep none.

    Example::

        x = torch.ones(2, requires_grad=True)
        (grad,) = backward([3 * x], [torch.ones(2)], [x])
    """
    if outputs:
        torch.autograd.backward(outputs, grads)
    return tuple(map(_taken, inputs))


def with_zeros(grads: Grads, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of ``inputs``, with zeros for those where none arrived."""
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def _taken(x: Tensor) -> Tensor | None:
    grad, x.grad = x.grad, None
    return grad


class SplitBackward:
    """The backward of one microbatch in two calls: `inputs`, and at any later time `weights`.

    Together they leave what `backward` leaves, with these differences: the graph lives until `weights`; a hook on an
    activation that a feeder made fires in both calls (each branch meets its result once); a block under
    ``torch.utils.checkpoint`` is computed again in both.

    Example::

        x, split = torch.ones(2, requires_grad=True), SplitBackward()
        (grad,) = split.inputs([net(x)], [torch.ones(2)], [x])
        split.weights()
    """

    def __init__(self) -> None:
        self.unsplit: str | None = None
        """Why `inputs` did the whole backward, where it did."""
        self._late: list[_Late] = []

    def inputs(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Grads:
        """The gradients of ``inputs``; arguments and result as of `backward`. Drop ``outputs`` afterwards.

        With no inputs there is nothing to compute, and all is left to `weights`.
        """
        # without the outputs' values, which may go meanwhile
        roots = [(get_gradient_edge(x), _root_grad(x, grad)) for x, grad in zip(outputs, grads, strict=True)]
        if not inputs:
            self._late = [_Late(roots, None, [])] if roots else []  # as on the first stage: it has nothing to send on
            return ()
        graph = _Graph([edge.node for edge, _ in roots])
        self.unsplit = graph.obstacle()
        if self.unsplit:
            return backward(outputs, grads, inputs)
        wanted = [get_gradient_edge(x) for x in inputs]
        blocks = graph.blocks([edge.node for edge in wanted])
        late = [block for block in blocks if not block.early]
        # these get their gradients in this call
        wanted += [leaf for block in blocks if block.early for leaf in block.leaves]
        met: dict[Node, Grads] = {}
        handles = [node.register_prehook(partial(met.__setitem__, node)) for block in late for node in block.feeders]
        try:
            # After other prehooks, and before the feeder itself.
            # What is late goes through the feeders again, so that the graph must stay.
            torch.autograd.backward(outputs, grads, inputs=wanted, retain_graph=bool(late))
        finally:
            for handle in handles:
                handle.remove()
        self._late = [rest for block in late if (rest := block.rest(roots, met)).roots]
        return tuple(map(_taken, inputs))

    def weights(self) -> None:
        """Accumulate the weights' gradients in their ``.grad``, and let go of the graph."""
        late, self._late = self._late[::-1], []
        with GraphExecGroup():  # a checkpointed block is computed once for all of its weights
            while late:
                late.pop().run()  # from the output's side: what has run is free at once


def _root_grad(output: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None and output.numel() != 1:
        raise ValueError(f"An output of shape {tuple(output.shape)} needs its gradient; only a loss does without.")
    return torch.ones_like(output) if grad is None else grad


Root = tuple[GradientEdge, Tensor]


@dataclass
class _Late:
    """A backward that is still to run, from ``roots`` to ``leaves`` (None: to all)."""

    roots: list[Root]
    leaves: list[GradientEdge] | None
    met: list[tuple[Node, Grads]]

    def run(self) -> None:
        # Hooks of a feeder's activation fire again; what they return was met once already.
        handles = [node.register_prehook(partial(_instead, grads)) for node, grads in self.met]
        try:
            edges, grads = zip(*self.roots)
            torch.autograd.backward(edges, grads, inputs=self.leaves)
        finally:
            for handle in handles:
                handle.remove()


def _instead(grads: Grads, _: Grads) -> Grads:
    return grads


@dataclass
class _Block:
    """Leaves beside the inputs' path that hang together, and the feeders on the path that lead to them."""

    feeders: list[Node] = field(default_factory=list)
    leaves: list[GradientEdge] = field(default_factory=list)
    nodes: set[Node] = field(default_factory=set)
    early: bool = False

    def rest(self, roots: list[Root], met: dict[Node, Grads]) -> _Late:
        """What is left of the backward once the first part has met the feeders."""
        reached = [(node, met[node]) for node in self.feeders if node in met]
        found = [(edge, grad) for edge, grad in roots if edge.node in self.nodes]  # of an output that no input leads to
        for node, grads in reached:
            found += [(GradientEdge(node, i), grad) for i, grad in enumerate(grads) if grad is not None]
        return _Late(found, self.leaves, reached)


_OBSTACLES = {
    "CheckpointFunctionBackward": (
        "torch.utils.checkpoint with use_reentrant=True refuses to compute a part of the gradients"
    ),
    "CompiledFunctionBackward": (
        "what torch.compile made writes into the memory that it kept, and refuses to run where the graph is to stay"
    ),
}
"""Nodes with which a graph is not run in two parts, by their names."""


class _Graph:
    """The autograd graph behind ``roots``. Holds every node: Python's object of one lives no longer than it is held."""

    def __init__(self, roots: Iterable[Node]) -> None:
        self.children: dict[Node, list[Node]] = {}
        self.parents: dict[Node, list[Node]] = {}
        level = list(dict.fromkeys(roots))  # in order, as a set is not: `blocks` gives the output's side first
        while level:
            for node in level:
                self.children[node] = [child for child, _ in node.next_functions if child is not None]
                for child in self.children[node]:
                    self.parents.setdefault(child, []).append(node)
            found = dict.fromkeys(child for node in level for child in self.children[node])
            level = [node for node in found if node not in self.children]

    def obstacle(self) -> str | None:
        """Why this graph can't be split, where it can't."""
        made_by = {node.name() for node in self.children}
        return next((why for name, why in _OBSTACLES.items() if name in made_by), None)

    def blocks(self, inputs: list[Node]) -> list[_Block]:
        """Everything beside the path of ``inputs``, the output's side first."""
        # all nodes on a way to an input
        path = _reached([node for node in inputs if node in self.children], self.parents)
        blocks: list[_Block] = []
        seen: set[Node] = set()
        for node in self.children:
            if node not in path and node not in seen:
                block = self._block(node, path)
                seen |= block.nodes
                if block.leaves:
                    block.early = any(map(_custom, block.feeders)) or self._nested(block.feeders, path)
                    blocks.append(block)
        return blocks

    def _block(self, start: Node, path: set[Node]) -> _Block:
        block, feeders, found = _Block(), dict[Node, None](), [start]
        while found:
            node = found.pop()
            if node in path:
                if node not in feeders:
                    feeders[node] = None
                    # so that a product's weight and its bias are in one block
                    found += [child for child in self.children[node] if child not in path]
            elif node not in block.nodes:
                block.nodes.add(node)
                # both ways: no node is in two blocks, since the run of one frees its buffers
                found += self.children[node] + self.parents.get(node, [])
                if node.name() == "torch::autograd::AccumulateGrad":
                    block.leaves.append(GradientEdge(node, 0))
        block.feeders = list(feeders)
        return block

    def _nested(self, feeders: list[Node], path: set[Node]) -> bool:
        """Whether the path leads from one feeder to another."""
        if len(feeders) < 2:
            return False
        below = {child for node in feeders for child in self.children[node] if child in path}
        return not _reached(list(below), self.children).isdisjoint(feeders)


def _reached(starts: list[Node], edges: dict[Node, list[Node]]) -> set[Node]:
    reached = set(starts)
    found = list(starts)
    while found:
        new = [node for node in edges.get(found.pop(), []) if node not in reached]
        reached.update(new)
        found += new
    return reached


def _custom(node: Node) -> bool:
    """Whether a user's autograd function, in Python or C++, made ``node``."""
    return isinstance(node, BackwardCFunction) or node.name().startswith("torch::autograd::CppNode")
