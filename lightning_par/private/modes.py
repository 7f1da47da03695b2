"""Modes, which see each torch function or each operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["TorchDispatchMode"]  # it has no public home

DisableTorchFunction = torch._C.DisableTorchFunction
"""Inside, neither classes of tensors nor modes see torch functions: both are to run as they are written."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside, classes of tensors don't see torch functions, modes do. What is public, to return from a class's
``__torch_function__``, costs more."""


number_of_modes = torch._C._len_torch_function_stack
"""How many modes see torch functions; cheaper than to look at them."""


is_any_autocast = torch._C._is_any_autocast_enabled
"""Whether there is autocast for devices of any kind; the public function asks for one kind, and takes longer."""


def innermost_mode() -> Any:
    """The mode that torch functions meet first, if there is one; torch has no public way to look at it."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode()


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """No mode sees what is done inside: neither those of torch functions nor those that make tensors fake."""
    with DisableTorchFunction():
        if not torch._C._len_torch_dispatch_stack():  # the next line costs some time
            yield
            return
        with _disable_current_modes():
            yield


@contextlib.contextmanager
def unselected() -> Iterator[None]:
    """What is done inside is none of the operations of which selective checkpointing keeps some, and counts all; other
    modes see it. The modes by which it does so have no public name."""
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    if not any(isinstance(mode, _SELECTION) for mode in modes):
        yield
        return
    with _disable_current_modes():
        others = [mode for mode in modes if not isinstance(mode, _SELECTION)]
        for mode in others:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in others:
                _pop_mode()


_SELECTION = torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode


def surroundings() -> tuple[Any, ...]:
    """What torch functions go by beside their arguments, where user code may have changed it around a call: whether
    gradients are kept, autocast, which kernels may be taken, and modes and hooks for which torch has no public name."""
    saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    cuda = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._functorch.peek_interpreter_stack() is None,
        None if saved_hooks is None else tuple(map(id, saved_hooks)),
    )
