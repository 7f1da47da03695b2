"""`torch.autograd.grad` of sharded tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.rules.table import rule
from lightning_par.view import ShardedTensor, full


def _end(x: Tensor) -> Tensor:
    """What a gradient is taken of: each sample's is its own, where samples run one after another."""
    return x._local if isinstance(x, ShardedTensor) and x._axis.by_sample else full(x)


def _seed(grad: Tensor, output: Tensor) -> Tensor:
    by_sample = isinstance(output, ShardedTensor) and output._axis.by_sample
    return output.part_of(grad) if by_sample else full(grad)  # type: ignore[attr-defined]


@rule("grad")
def grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A sharded input's gradient is sharded as it is."""

    def listed(x: Any) -> list[Any]:
        return [x] if isinstance(x, Tensor) else list(x)

    inputs, seeds = listed(inputs), None if grad_outputs is None else listed(grad_outputs)
    if seeds is not None:
        seeds = [_seed(g, x) if isinstance(g, Tensor) else g for g, x in zip(seeds, listed(outputs), strict=True)]
    wholes, given = [_end(x) for x in listed(outputs)], seeds
    local = func(wholes, [x._local if isinstance(x, ShardedTensor) else x for x in inputs], given, *args, **kwargs)
    return tuple(
        x.with_local(g) if isinstance(x, ShardedTensor) and isinstance(g, Tensor) else g for x, g in zip(inputs, local)
    )
