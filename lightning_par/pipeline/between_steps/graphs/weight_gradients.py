"""`torch.autograd.grad` of weights that some ranks of a pipeline hold, in user code between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.pipeline.between_steps.gradients.remote_gradient import Gradient
from lightning_par.pipeline.between_steps.graphs.weight_graphs import in_graph
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients


def is_grad(func: Any) -> bool:
    """Whether ``func`` is `torch.autograd.grad`, or what stands for it."""
    return getattr(func, "__name__", "") == "grad" and (getattr(func, "__module__", "") or "").startswith(
        "torch.autograd"
    )


def gradients(owner: JointGradients, args: Any, kwargs: Any) -> tuple[Tensor | None, ...]:
    """What `torch.autograd.grad` gives, on all ranks, which must call it.

    Raises:
        RuntimeError: as torch does.
        NotImplementedError: it can't be had over several ranks.
    """
    return _gradients(owner, *args, **kwargs)


def _gradients(
    owner: JointGradients,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    wanted = [in_graph(owner, x) for x in (inputs if isinstance(inputs, (list, tuple)) else [inputs])]
    names = [owner.spread_name(x) if owner.is_weight(x) else None for x in wanted]
    _refuse(owner, wanted, names, create_graph)
    found = torch.autograd.grad(
        outputs,
        [x if name is None else owner.ends.edge(x) for x, name in zip(wanted, names, strict=True)],
        grad_outputs,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,
        is_grads_batched=is_grads_batched,
    )
    there = _there(owner, names, found)
    if not all(there) and not allow_unused and not materialize_grads:
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    given = [
        g if name is None or create_graph else _sent(owner, name, x, g) if is_there else None
        for x, name, g, is_there in zip(wanted, names, found, there, strict=True)
    ]
    if materialize_grads:
        given = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, given, strict=True)]
    return tuple(given)


def _refuse(owner: JointGradients, wanted: list[Any], names: list[str | None], create_graph: bool) -> None:
    for x, name in zip(wanted, names, strict=True):
        if owner.is_weight(x) and name is None:
            raise NotImplementedError(
                f"{user_line()}: the gradient of a view or copy of {owner.name_of(x)!r} is asked for, which is on some "
                "ranks of the pipeline alone. Ask for that of the weight."
            )
        if name is not None and not x.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        if name in owner.in_parts and create_graph:
            raise NotImplementedError(
                f"{user_line()}: `create_graph=True` for the gradient of {name!r}, which is kept in parts on a stage "
                "of the pipeline, can't be had between steps. Leave tensors whole, by a layout without a tensor axis "
                "and fsdp, or leave it out."
            )
        if name is not None and owner.in_parts.get(name) == "data":  # where a backward averages it on its way
            raise NotImplementedError(
                f"{user_line()}: `torch.autograd.grad` for {name!r}, which replicas store in parts on a stage of the "
                "pipeline, would give the average over replicas, and not this one's gradient, as it does elsewhere. "
                "Call `backward` and read `p.grad`, or leave out data_parallel='fsdp'."
            )


def _there(owner: JointGradients, names: list[str | None], found: tuple[Tensor | None, ...]) -> list[bool]:
    """Which gradients there are, on any rank."""
    mine = [g is not None and (name is None or owner.sources[name] == owner.axis.rank) for name, g in zip(names, found)]
    owner.meet("asked for the gradients of weights")
    told: list[list[bool]] = owner.axis.all_gather_object(mine, "gradients")
    return [any(ranks) for ranks in zip(*told)]


def _sent(owner: JointGradients, name: str, x: Any, found: Tensor | None) -> Tensor:
    here = x.with_local(found) if isinstance(x, ShardedTensor) and found is not None else found
    return Gradient(owner, name, x, here).whole()
