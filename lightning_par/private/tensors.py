"""What a tensor is made of, beside its memory: its class, its version, its place in the memory of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""Makes a tensor of a subclass without memory of its own, as DTensor is made; torch's guide for subclasses names it."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that has none, as `nn.Parameter` has."""

write_count: Callable[[Tensor], int] = attrgetter("_version")
"""How often the memory of a tensor was written to, as autograd counts, by no public name; inference tensors raise."""

view_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor of which another is a view, None if it is none, to autograd."""

get_data: Callable[[Tensor], Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
"""``x.data`` unseen by what may replace it: the memory of ``x`` with a version of its own."""

set_data: Any = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
"""As which torch functions meet an assignment to ``x.data``; ``torch.Tensor.data`` may be replaced."""

as_class: Callable[[Tensor, Any], Any] = torch._C.TensorBase.as_subclass
"""``x.as_subclass(kind)``, whatever replaces that: the values, memory and graph of ``x`` in the class ``kind``."""

GRADIENT: Any = torch._C.TensorBase.grad
"""The descriptor of ``x.grad``, as which torch functions meet it; ``torch.Tensor.grad`` may be replaced."""


def counter_of(x: Tensor) -> Tensor:
    """What shares the `write_count` of ``x`` and of its views, and has no memory, nor holds theirs: torch has no name
    for a version by itself. ``x`` is none of inference mode."""
    counter = x.detach()
    set_data(counter, x.new_empty(0))
    return counter


PARAMETER_MARK = "_is_param"
"""The attribute by which a tensor of a subclass is an `nn.Parameter` to ``isinstance``."""


_same_memory = torch.ops.aten._unsafe_view.default


def with_node(x: Tensor) -> Tensor:
    """``x`` in the same memory, with a node of the graph behind it: neither a leaf, nor a view of one to autograd, so
    that it may be written into. A custom function does the same in Python, here and in backward."""
    return _same_memory(x, x.shape)  # type: ignore[no-any-return]


is_view: Callable[[Tensor], bool] = torch.Tensor._is_view
"""Whether a tensor is a view to autograd; unlike `view_base` it makes no tensor."""


def mark_parameter(x: Tensor, is_parameter: bool = True) -> None:
    """Let ``isinstance(x, nn.Parameter)`` hold for a tensor of a subclass, or not; it has no public way but a copy."""
    x._is_param = is_parameter  # type: ignore[attr-defined]


def is_marked(x: Tensor) -> bool:
    """Whether `mark_parameter` marked ``x``."""
    return getattr(x, PARAMETER_MARK, False)


def is_referred(x: Tensor) -> bool:
    """Whether C++ code refers to ``x``, as a view to its base."""
    return x._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def is_held(x: Tensor) -> bool:
    """Whether C++ code or a weak reference refers to ``x``, so that it can't be swapped; torch checks the same."""
    return is_referred(x) or bool(weakref.getweakrefs(x))


def stored_values(x: Any) -> int | None:
    """How many values ``x`` stores, where it is a sparse tensor."""
    return x._nnz() if isinstance(x, Tensor) and x.layout is not torch.strided else None  # type: ignore[no-any-return]
