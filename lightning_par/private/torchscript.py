"""What torch says of code of its own interpreter."""

from __future__ import annotations

_SAYS = "The following operation failed in the TorchScript interpreter"


def failed_in_torchscript(error: BaseException) -> bool:
    """Whether ``error`` was raised by an operation of a function or module of `torch.jit.script`."""
    return str(error).startswith(_SAYS)
