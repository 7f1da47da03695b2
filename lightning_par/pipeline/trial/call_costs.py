"""What the calls of modules in a step cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.pipeline.plan.units import ModuleCall
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.functions import MATRIX_PRODUCTS, RECURRENT
from lightning_par.sharded.tensor import ShardedTensor


class Closing(NamedTuple):
    """Why a module may not be opened.

    Attributes:
        why: in words.
        children: calls in it before that showed.
        calls: of modules with parameters in the step before that showed; infinite where those outside don't matter,
            -1 where none need follow.
    """

    why: str
    children: int
    calls: float


@dataclass
class Frame:
    """A call of a module, which may be running.

    Attributes:
        first: the number of the step's functions before it.
        end: the number of those before and within it.
        place: file:line of the user's code that makes it.
    """

    path: str
    numel: int
    first: int = 0
    end: int = 0
    place: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    children: list[Frame] = field(default_factory=list)
    closing: Closing | None = None

    def call(self, calls: int = 0) -> ModuleCall:
        """It can't be opened where modules follow on what the reason is about.

        Args:
            calls: of modules with parameters in the whole step.
        """
        reason, closed = self.closing, None
        if reason is not None:
            follows = any(child.numel for child in self.children[reason.children :]) or calls > reason.calls
            closed = reason.why if follows else None
        children = tuple(child.call(calls) for child in self.children)
        return ModuleCall(self.path, self.flops, self.numel, children, closed, self.nbytes)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Multiplications times two of a product of matrices, a convolution or attention; else the size of the result."""
    name = getattr(func, "__name__", "")
    out = next((x for x in tree_leaves(result) if isinstance(x, Tensor)), None)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if out is None or not tensors:
        return 0.0
    if name in MATRIX_PRODUCTS:
        # the first of these is what is added
        x = tensors[1] if name in ("addmm", "baddbmm") and len(tensors) > 2 else tensors[0]
        return 2.0 * _size(out) * x.shape[-1] if x.ndim else 0.0
    if name.startswith("conv") and len(tensors) > 1:
        weight = tensors[1]
        return 2.0 * _size(out) * weight[0].numel() if weight.ndim > 1 else 0.0  # products for each entry of the result
    if name == "scaled_dot_product_attention" and len(tensors) > 2:
        # queries times keys, weights times values
        return 2.0 * _size(tensors[0]) * (tensors[1].shape[-2] + tensors[2].shape[-2])
    if name in RECURRENT:
        weights = sum(_size(x) for x in tensors if x.ndim == 2)
        return 2.0 * weights * _size(tensors[0]) / max(1, tensors[0].shape[-1])
    return float(_size(out))


def _size(x: Tensor) -> int:
    return x.local.numel() if isinstance(x, ShardedTensor) else x.numel()


def nbytes_of(args: Any, kwargs: Any, result: Any) -> float:
    """The memory of what a function returned, without that of its arguments."""
    known = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    new = {_memory(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
    return float(sum(x.numel() * x.element_size() for memory, x in new.items() if memory not in known))


def _memory(x: Tensor) -> Any:
    if x.layout != torch.strided or in_functorch():  # a transform's tensors don't tell
        return id(x)
    return StorageWeakRef(x.untyped_storage())
