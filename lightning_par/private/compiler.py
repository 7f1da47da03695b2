"""What ``torch.compile`` made."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_uncompiled: list[Any] = []  # one for each context that is entered, of whatever thread


_stance = threading.Lock()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what the user has compiled runs as it is written. Nothing has been compiled where torch's compiler was
    never imported, which takes seconds; that can be seen by its private name alone."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _stance:
        _uncompiled.append(_uncompiled[0] if _uncompiled else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _stance:
            stance = _uncompiled.pop()
            if not _uncompiled:
                stance.__exit__(None, None, None)


def is_loaded() -> bool:
    """Whether anything may have been compiled."""
    return "torch._dynamo" in sys.modules


def graph_owner() -> Any:
    """The class whose method ``call_user_compiler`` hands a captured graph and its example inputs to the backend that
    is its ``compiler_fn``. A backend of one's own has a public place, but another's can't be wrapped there."""
    from torch._dynamo.output_graph import OutputGraph

    return OutputGraph


_COMPILER = (
    "torch._dynamo.",
    "torch._functorch.",
    "torch._inductor.",
    "torch._subclasses.",
    "torch._guards",
    "torch.fx.",
)


def may_know(frame: types.FrameType | None) -> bool:
    """Whether what runs there may know that a tensor wraps others: all but those who ask torch for it from outside of
    the compiler. Its guards look at the tensor itself, in the frames of the code that they guard."""
    where = _module(frame)
    if where != "torch.utils._python_dispatch":
        return True
    while frame is not None and where == "torch.utils._python_dispatch":
        frame = frame.f_back
        where = _module(frame)
    return where.startswith(_COMPILER)


def _module(frame: types.FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def skip_frame(why: str) -> Exception:
    """Raised where a graph is handed on, it lets the code that was captured run as it is written."""
    from torch._dynamo.exc import SkipFrame

    return SkipFrame(why)


def is_higher_order(function: Any) -> bool:
    """Whether a node's function runs graphs of its own, as checkpointing does and the user's autograd functions do."""
    from torch._ops import HigherOrderOperator

    return isinstance(function, HigherOrderOperator)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` made of another; its class has no public name."""
    return type(module).__module__ == "torch._dynamo.eval_frame"
