"""What the calls of modules in a step cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.pipeline.plan.units import ModuleCall
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.functions import MATRIX_PRODUCTS, RECURRENT
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor


class Closing(NamedTuple):
    """Why a module may not be opened.

    Attributes:
        why: in words.
        children: calls in it before that showed.
        calls: of modules with parameters in the step before that showed; infinite where those outside don't matter,
            -1 where none need follow.
        always: whether it may not where a step runs layer by layer, either.
    """

    why: str
    children: int
    calls: float
    always: bool = False


@dataclass
class Frame:
    """A call of a module, which may be running.

    Attributes:
        first: the number of the step's functions before it.
        end: the number of those before and within it.
        place: file:line of the user's code that makes it.
        function: the last call of a `torch.autograd.Function` in its own code that called a module, and the module.
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
    function: tuple[FrameType | None, str] = (None, "")

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
        always = closed is not None and reason is not None and reason.always
        return ModuleCall(self.path, self.flops, self.numel, children, closed, self.nbytes, always)


class CallTree:
    """The calls of modules in a run of a step that is on: which lies in which, and what they cost.

    Attributes:
        frames: the calls that are running, the step itself first.
        calls: of modules with parameters.
        buffers: ids of the module's buffers, and their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frames = [Frame("", 0)]
        self.calls = 0
        self.buffers: dict[int, str] = {}

    def number(self) -> int:
        """How many functions have run outside of units."""
        raise NotImplementedError

    def enter_module(self, path: str, numel: int) -> None:
        self.calls += bool(numel)
        self.frames.append(Frame(path, numel, self.number()))

    def leave_module(self) -> None:
        frame = self.frames.pop()
        frame.end, frame.place, frame.function = self.number(), user_line(), (None, "")
        self.frames[-1].flops += frame.flops
        self.frames[-1].nbytes += frame.nbytes
        self.frames[-1].children.append(frame)

    def in_function(self, path: str, call: FrameType | None) -> None:
        """The module ``path``, with parameters, is about to be called within ``call`` of a `torch.autograd.Function`.

        Its backward may call all of its modules again, as that of a reversible network does, on the rank that has it.
        """
        before, other = self.frames[-1].function
        if call is not None and call is before and path != other:
            self.close_modules(
                f"it calls {other!r} and {path!r} in a torch.autograd.Function, whose backward may call both again",
                always=True,
            )
        self.frames[-1].function = (call, path)

    def close_modules(self, why: str, reads: bool = False, always: bool = False) -> None:
        """The module whose own code is running can't be taken apart.

        Args:
            why: in words.
            reads: whether it goes by a value, which only the rank that has it may do, whatever modules follow.
            always: whether it can't where the step runs layer by layer, either, and the step's own code can't.
        """
        for frame in reversed(self.frames[0 if always else 1 :]):
            if frame.closing is None or always:
                frame.closing = Closing(why, len(frame.children), self.calls if reads else inf, always)
            if frame.numel:  # one without parameters is no unit: its code is that of the module around it
                return

    def charge(self, func: Any, args: Any, kwargs: Any, result: Any, keeps: bool = True) -> None:
        """A function of values of the model has run; its result's memory counts if it ``keeps`` it."""
        if getattr(func, "__name__", "") == "batch_norm" and any(id(x) in self.buffers for x in args):
            self.frames[-1].closing = Closing("its own code updates running statistics", 0, -1)
        self.frames[-1].flops += flops_of(func, args, kwargs, result)
        if keeps:
            self.frames[-1].nbytes += nbytes_of(args, kwargs, result)


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
