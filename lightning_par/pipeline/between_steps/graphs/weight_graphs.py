"""The graph of what all ranks of a pipeline make, between two steps, of weights that some of them hold.

The values that are sent have the same graph on all ranks, so that their backward comes to all with the same gradient:
the ranks that hold the weight take it. A view or copy of a weight, of which values are sent, too, remembers its way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.pipeline.between_steps.graphs.unit_graph import innermost
from lightning_par.pipeline.between_steps.graphs.unlinked import no_gradients, unlinked
from lightning_par.private.leaf_hooks import number_of_leaf_hooks
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded import backward_reach
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

MADE_OF = "is made of a pipeline's weights between two steps"


def has_graph(owner: JointGradients, x: Any) -> bool:
    """Whether what is made of ``x`` now has gradients: the same on all ranks, of which some have ``x`` itself."""
    if not torch.is_grad_enabled() or not owner.is_weight(x):
        return False
    return (owner.spread_name(x) is not None or _is_leaf(x)) and bool(x.requires_grad) or bool(vars(x).get("_links"))


def _is_leaf(x: Tensor) -> bool:
    """Whether a copy of a weight is a leaf of its own, as by `copy.deepcopy`."""
    return x.is_leaf and vars(x).get("_way") is None


def note_way(owner: JointGradients, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """``func`` has made views or copies of a weight, its first argument."""
    links = has_graph(owner, args[0])
    for n, x in enumerate(tensors_in(result)):
        if owner.is_weight(x) and x is not args[0]:
            x._links, x._way = links, (func, args, kwargs, n) if links else None  # type: ignore[attr-defined]


def linked(owner: JointGradients, x: Any, values: Tensor) -> Tensor:
    """The ``values`` of ``x``, which have been sent, in the graph of all ranks."""
    graph = _graph_of(owner, x)
    if graph is None:
        return unlinked(values, MADE_OF, (owner.ends.of(p) for p in owner.parameters.values()))
    found: Tensor = _Valued.apply([values], graph)
    return found


def _graph_of(owner: JointGradients, x: Any) -> Tensor | None:
    """What is in the place of ``x`` in that graph, without its values; None where its way is not known.

    A copy of a weight is one tensor however often it is read, so that `torch.autograd.grad` can be asked for its
    gradient.
    """
    known = vars(x).get("_in_graph")
    if known is not None:
        return known  # type: ignore[no-any-return]
    graph = _new_graph_of(owner, x)
    way = vars(x).get("_way")
    if graph is not None and (name_of(way[0]) == "clone" if way else owner.spread_name(x) is None):
        x._in_graph = graph  # type: ignore[attr-defined]
    return graph


def _new_graph_of(owner: JointGradients, x: Any) -> Tensor | None:
    if owner.spread_name(x) is not None:
        found: Tensor = _OfWeight.apply(partial(_taken, owner, x), _lies(x), owner.ends.of(x))
        return found
    way = vars(x).get("_way")
    if way is None:
        return _end_of_copy(x) if _is_leaf(x) and x.requires_grad else None
    func, args, kwargs, n = way
    base = _graph_of(owner, args[0])
    return None if base is None else tensors_in(func(base, *args[1:], **kwargs))[n]


def _end_of_copy(x: Tensor) -> Tensor:
    """Where the gradient of a copy that is a leaf arrives, if it is asked for: nobody would find it in ``.grad``."""
    end = torch.empty_strided(*_lies(x), dtype=x.dtype, device=x.device).requires_grad_()
    end.register_post_accumulate_grad_hook(_refuse_copy)
    return end


def _refuse_copy(_: Tensor) -> None:
    raise RuntimeError(no_gradients(MADE_OF))


def in_graph(owner: JointGradients, x: Any) -> Any:
    """What is in the place of ``x`` in the graph of all ranks, if it is a copy of a weight that is in that."""
    return vars(x).get("_in_graph", x) if isinstance(x, Tensor) and owner.is_weight(x) else x


class _OfWeight(torch.autograd.Function):
    is_told = True

    @staticmethod
    def forward(ctx: Any, taken: Callable[[Tensor], Tensor | None], lies: tuple[Any, Any], end: Tensor) -> Tensor:
        ctx.taken = taken  # of a weight that is no input itself, as it would be with what is made whole for a function
        return torch.empty_strided(*lies, dtype=end.dtype, device=end.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, ctx.taken(grads[0])


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boxed: list[Tensor], graph: Tensor) -> Tensor:
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0]


def _lies(x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(x.shape), x.stride()


def _taken(owner: JointGradients, weight: Any, gradient: Tensor) -> Tensor | None:
    """What this rank takes of the ``gradient`` of ``weight``, in a backward.

    Raises:
        RuntimeError: the backward is that of a step, which does not come to all ranks, or the run has ended.
    """
    if owner.is_plain or owner.ends.closed:
        raise RuntimeError(no_gradients(MADE_OF))
    owner.ends.begin()
    if is_elsewhere(weight):
        if not (number_of_leaf_hooks(weight) or torch.is_grad_enabled()) or weight.origin.sharding is not None:
            return None
        owner.ends.run_hooks(weight)
        return gradient
    if not isinstance(weight, ShardedTensor):
        return gradient
    shares = RunState.current.shared_backward
    summed = backward_reach.sharing(innermost(weight), shares)  # by who syncs gradients
    among_parts = tuple(axis for axis in shares if not any(axis is other for other in summed))
    return innermost(weight.part_of_gradient(gradient, among_parts))
