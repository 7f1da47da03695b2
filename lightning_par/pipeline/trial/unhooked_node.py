"""Nodes of autograd's graph, as a trial hands them out."""

from __future__ import annotations

from typing import Any, NoReturn


class UnhookedNode:
    """A node on which no hook can be put: the rank that makes the value has it, and the others another one.

    Args:
        node: of autograd's graph.
        place: ``file:line`` of the user's code that asks for it.

    Example::

        node = UnhookedNode(torch.ones(1, requires_grad=True).exp().grad_fn, "model.py:3")
        assert node.name() == "ExpBackward0"
        node.register_hook(print)  # NotImplementedError
    """

    def __init__(self, node: Any, place: str) -> None:
        self._node, self._place = node, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, hook: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._place}: a training step puts a hook on a node of autograd's graph (`grad_fn`), which one rank of "
            "the pipeline has, and for a microbatch alone. Put it on the tensor, by `x.register_hook`, which meets the "
            "gradient on all ranks, or use TensorParallelStrategy."
        )

    register_prehook = register_hook
