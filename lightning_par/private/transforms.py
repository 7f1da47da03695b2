"""torch's transforms of functions, such as ``vmap``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_innermost = torch._C._functorch.peek_interpreter_stack


def in_functorch() -> bool:
    """Whether a transform such as ``vmap`` runs: its tensors can't be wrapped. torch tells it by no public name."""
    return _innermost() is not None


def is_wrapped(x: Tensor) -> bool:
    """Whether ``x`` is a transform's own tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_batched(x: Tensor) -> bool:
    """Whether ``x`` stands for several gradients with which a backward begins, by ``is_grads_batched``: of a ``vmap``
    that is older than the transforms, and has no other sign."""
    return torch._C._dispatch_keys(x).has(torch._C._dispatch_key_parse("Batched"))


def unwrapped(x: Tensor) -> Tensor:
    """What a transform's own tensor stands for, or ``x``."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def without_saved_tensors_hooks() -> contextlib.AbstractContextManager[None]:
    """Inside, what is saved for backward passes no hook: the transforms that differentiate refuse to run under one."""

    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with suspended():
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    return suspended()


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Inside, what a transformed function closes over is what it is outside: any autograd function takes it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def transforms() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Where torch's transforms begin, a function's module and name, and what the user calls, and has imported by now;
    where they ask for gradients; and what flex attention does first with query, key and value."""
    from torch._functorch import apis, eager_transforms
    from torch.nn.attention import flex_attention

    names = {"grad_impl": torch.func.grad, "grad_and_value_impl": torch.func.grad_and_value,
             "_vjp_with_argnums": torch.func.vjp, "_jvp_with_argnums": torch.func.jvp,
             "_autograd_grad": torch.autograd.grad}  # fmt: skip
    found: list[tuple[Any, str, Any]] = [(eager_transforms, name, public) for name, public in names.items()]
    flex = (flex_attention, "_enforce_mem_layouts", flex_attention.flex_attention)
    return [(apis, "vmap_impl", torch.vmap), *found, flex]
