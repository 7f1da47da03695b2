"""Nodes of autograd's graph as user code is given them: a hook on one meets what it would on one device, or is refused.

A hook of a tensor (``x.register_hook``) is given the tensor's whole gradient in every layout. A node is below tensors:
what comes to it is the gradient of this rank's part, or its share, and a pipeline's rank has nodes of its stages alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_par.private.graph import Accumulation, NodeStand, asker_of_node, function_of
from lightning_par.sharded import backward_reach
from lightning_par.sharded.parts import parts_along
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.who_reads import is_inner
from lightning_par.trial.memo import Memo

PARTS = "which works on this rank's part of a tensor"
SHARES = "to which this rank's share of a gradient comes"
STAGES = "of which each rank of a pipeline has those of its own stages"
UNSYNCED = "to which this rank's own gradient comes, before the ranks' are synced"
_ADVICE = "Do it in on_before_optimizer_step, or by `register_hook` of the weight."


def as_asked(node: Any, x: Tensor, frame: types.FrameType, torn: str | None = None) -> Any:
    """The ``node`` that made ``x``, as the code of ``frame`` knows it; torch's and our own gets it as it is.

    Args:
        node: None for a leaf, and where another stage has it.
        x: which may be a part of what the code asked.
        frame: of the code that reads ``grad_fn``.
        torn: why hooks on it would not meet what they do on one device; found out where it is None.
    """
    if node is None and not vars(x).get("_links") or is_inner(asker_of_node(frame)):
        return node
    if node is None:
        from lightning_par.sharded.rules.gather_report import user_line

        raise NotImplementedError(
            f"{user_line()}: the node of autograd's graph behind a view of a weight is asked for, {STAGES}. {_ADVICE}"
        )
    return _of(node, torn or RunState.current.torn or _why(x))


def _why(x: Tensor) -> str | None:
    if parts_along(x):
        return PARTS
    state = RunState.current
    axes = state.shared or state.shared_backward or state.shared_between_steps
    return SHARES if backward_reach.sharing(x, axes) else None


def _of(node: Any, torn: str | None) -> Any:
    """What stands for ``node``, of a class that has the name of its own."""
    return _kinds[type(node)](node, torn)


class AskedNode(NodeStand):
    """What stands for a node of autograd's graph in user code.

    Args:
        node: the real one.
        torn: why hooks on it, and on those behind it, would not meet what they do on one device; None where they do.
    """

    def __init__(self, node: Any, torn: str | None) -> None:
        super().__init__(node)
        self._torn = torn

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        torn = self._torn or (PARTS if _is_ours(self.node) else None)
        return tuple((n if n is None else _of(n, torn), place) for n, place in self.node.next_functions)

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        self._refuse_torn()
        return self.node.register_hook(fn)

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        self._refuse_torn()
        return self.node.register_prehook(fn)

    def _refuse_torn(self) -> None:
        leaf = self.node.variable if type(self.node) is Accumulation else None
        torn = self._torn or (None if leaf is None else _why_of_leaf(leaf)) or (PARTS if _is_ours(self.node) else None)
        if torn is not None:
            from lightning_par.sharded.rules.gather_report import user_line

            raise NotImplementedError(
                f"{user_line()}: a hook is put on a node of autograd's graph ({self.name()}, by `grad_fn`), {torn}. "
                + (
                    "Write `x.register_hook(hook)`, which is given the whole gradient of x, and may return another."
                    if leaf is None
                    else _ADVICE
                )
            )


_kinds: Memo[type, type[AskedNode]] = Memo(lambda kind: type(kind.__name__, (AskedNode,), {}))


def _is_ours(node: Any) -> bool:
    """Whether ranks talk there, so that what is behind it works on parts."""
    function = function_of(type(node))
    return function is not None and function.__module__.startswith("lightning_par.")


def _why_of_leaf(leaf: Tensor) -> str | None:
    if parts_along(leaf):
        return PARTS
    return UNSYNCED if RunState.current.syncs and isinstance(leaf, nn.Parameter) else None
