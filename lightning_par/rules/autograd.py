"""`torch.autograd.grad` of sharded tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.rules.table import rule
from lightning_par.view import ShardedTensor, full


@rule("grad")
def grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A sharded input's gradient is sharded as it is."""

    def listed(x: Any) -> list[Any]:
        return [x] if isinstance(x, Tensor) else list(x)

    wholes = [full(x) for x in listed(outputs)]
    given = None if grad_outputs is None else [None if g is None else full(g) for g in listed(grad_outputs)]
    inputs = listed(inputs)
    local = func(wholes, [x._local if isinstance(x, ShardedTensor) else x for x in inputs], given, *args, **kwargs)
    return tuple(
        x.with_local(g) if isinstance(x, ShardedTensor) and isinstance(g, Tensor) else g for x, g in zip(inputs, local)
    )
