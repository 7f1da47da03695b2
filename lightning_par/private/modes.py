"""Modes, which see each torch function or each operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode"]  # it has no public home

DisableTorchFunction = torch._C.DisableTorchFunction
"""Inside, neither classes of tensors nor modes see torch functions: both are to run as they are written."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside, classes of tensors don't see torch functions, modes do. What is public, to return from a class's
``__torch_function__``, costs more."""


def is_any_mode() -> bool:
    """Whether a mode sees torch functions; cheaper than to look at it."""
    return torch._C._len_torch_function_stack() > 0


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
