"""What is known of a torch function that an optimizer calls: whether it may run on parts, or reads its arguments only.

A function that is not listed may do anything: hand out views, write, or take the address of its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lightning_par.private.operators import HOMES
from lightning_par.sharded.rules import lookup, pointwise
from lightning_par.trial.memo import Memo

_READS = """
sum nansum mean norm linalg_vector_norm var std prod amax amin max min any all count_nonzero dot vdot matmul mm bmm mv
addmm addmv addbmm baddbmm outer ger dist stack cat hstack vstack dstack concat concatenate cumsum cumprod logsumexp
softmax log_softmax topk sort argsort argmax argmin __matmul__ __rmatmul__ tril triu
""".split()
_NUMBERS = "item tolist equal allclose is_nonzero __bool__ __float__ __int__ __index__ __complex__ __len__".split()
_VIEWS = """
view reshape view_as reshape_as expand expand_as flatten unflatten ravel squeeze unsqueeze t transpose swapaxes
swapdims movedim moveaxis permute adjoint __getitem__ narrow select chunk split tensor_split unbind diagonal
broadcast_to T mT H mH
""".split()
_EACH = "contiguous detach detach_".split()
_FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


class Effect(Enum):
    """What a function does with tensors that it is given."""

    METADATA = auto()
    """Reads no values: a shape, a dtype."""
    BY_ELEMENT = auto()
    """Makes each entry, or writes it, of the same entries of its arguments."""
    LISTS = auto()
    """As `BY_ELEMENT`, for each tensor of a list by itself."""
    NEW = auto()
    """Reads the dtype and device alone."""
    READS = auto()
    """Makes new tensors, and changes nothing; their shapes follow from the arguments' shapes."""
    NUMBER = auto()
    """Makes a number for Python, and changes nothing."""
    VIEWS = auto()
    """May return the same memory."""
    OTHER = auto()


@dataclass(frozen=True)
class Function:
    """A torch function.

    Args:
        name: what the user calls it.
        kind: what it does.
        writes: whether it writes into its first argument.
    """

    name: str
    kind: Effect
    writes: bool


def function_of(func: Any) -> Function:
    """What is known of ``func``, as a `torch.overrides.TorchFunctionMode` is given it.

    Example::

        assert function_of(torch.Tensor.add_) == Function("add_", Kind.BY_ELEMENT, True)
    """
    return _known[func]


def _function_of(func: Any) -> Function:
    name = func.__self__.__name__ if getattr(func, "__name__", "") == "__get__" else getattr(func, "__name__", "")
    return Function(name, _kind(func, name), lookup.writes(name) or name == "__set__")


_known = Memo(_function_of)


def _kind(func: Any, name: str) -> Effect:
    module = getattr(func, "__module__", None) or "torch"
    if getattr(func, "__name__", "") == "__get__":
        return (
            Effect.VIEWS if name in _VIEWS else Effect.OTHER if name in ("real", "imag", "_base") else Effect.METADATA
        )
    if module.startswith((*HOMES, "torch.fft", "torch.special")) or not module.startswith("torch"):
        return Effect.OTHER
    rule = lookup.RULES.get(name)
    if rule in (lookup._metadata, lookup.is_contiguous, lookup.is_same_size) or name == "requires_grad_":
        return Effect.METADATA
    if rule in (pointwise.pointwise, pointwise.to, pointwise.type_as, pointwise.copy_) or name in _EACH:
        return Effect.BY_ELEMENT
    if rule is pointwise.new:
        return Effect.NEW
    if name in _FUSED or name.startswith("_foreach_") and name != "_foreach_norm" and name in lookup.RULES:
        return Effect.LISTS
    kinds = ((_READS, Effect.READS), (_NUMBERS, Effect.NUMBER), (_VIEWS, Effect.VIEWS))
    return next((kind for names, kind in kinds if name in names), Effect.OTHER)
