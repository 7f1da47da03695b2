"""Code of torch's own interpreter: what torch says of it, and what it calls."""

from __future__ import annotations

import re

import torch

_SAYS = "The following operation failed in the TorchScript interpreter"


def failed_in_torchscript(error: BaseException) -> bool:
    """Whether ``error`` was raised by an operation of a function or module of `torch.jit.script`."""
    return str(error).startswith(_SAYS)


def operators_in(function: torch.jit.ScriptFunction) -> list[str]:
    """The names of torch's operators that ``function`` calls, those of functions that it calls among them."""
    return re.findall(r"= aten::(\w+)", str(function.inlined_graph))
