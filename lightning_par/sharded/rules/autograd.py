"""`torch.autograd.grad` and `backward` of sharded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.rules.lookup import rule
from lightning_par.sharded.tensor import ShardedTensor, full


def _end(x: Tensor) -> Tensor:
    """What a gradient is taken of: each sample's is its own, where samples run one after another."""
    return x._local if isinstance(x, ShardedTensor) and x._axis.by_sample else full(x)


def _seed(grad: Tensor, output: Tensor) -> Tensor:
    by_sample = isinstance(output, ShardedTensor) and output._axis.by_sample
    return output.part_of(grad) if by_sample else full(grad)  # type: ignore[attr-defined]


@rule("grad")
def grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A sharded input's gradient is sharded as it is."""

    inputs, seeds = _listed(inputs), None if grad_outputs is None else _listed(grad_outputs)
    if seeds is not None:
        seeds = [_seed(g, x) if isinstance(g, Tensor) else g for g, x in zip(seeds, _listed(outputs), strict=True)]
    wholes, given = [_end(x) for x in _listed(outputs)], seeds
    local = func(wholes, [x._local if isinstance(x, ShardedTensor) else x for x in inputs], given, *args, **kwargs)
    return tuple(
        x.with_local(g) if isinstance(x, ShardedTensor) and isinstance(g, Tensor) else g for x, g in zip(inputs, local)
    )


@rule("backward")
def backward(func: Any, tensors: Any, *seeds: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """Each part's gradient is a part of the seed. A gather would have no graph where this is called in a backward."""
    if len(seeds) > 1:
        return NotImplemented
    given = seeds[0] if seeds else kwargs.pop("gradient" if "gradient" in kwargs else "grad_tensors", None)
    roots = _listed(tensors)
    pairs = zip(roots, [None] * len(roots) if given is None else _listed(given), strict=True)
    begun = [_begun(x, seed) for x, seed in pairs]
    if inputs is not None:
        kwargs["inputs"] = [x._local if isinstance(x, ShardedTensor) else x for x in _listed(inputs)]
    return torch.autograd.backward([root for root, _ in begun], [seed for _, seed in begun], **kwargs)


def _begun(x: Any, seed: Tensor | None) -> tuple[Any, Tensor | None]:
    if type(x) is ShardedTensor:
        if seed is None and x.numel() == 1:
            seed = torch.ones(x.shape, dtype=x.dtype, device=x.device)
        return x._local, None if seed is None else x.part_of(seed)
    with torch.enable_grad():
        return full(x) if isinstance(x, Tensor) else x, None if seed is None else full(seed)


def _listed(x: Any) -> list[Any]:
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, list | tuple) else [x]
