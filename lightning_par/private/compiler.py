"""What ``torch.compile`` made."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_uncompiled: list[Any] = []  # one for each context that is entered, of whatever thread


_stance = threading.Lock()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what the user has compiled runs as it is written. Nothing has been compiled where torch's compiler was
    never imported, which takes seconds; that can be seen by its private name alone."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Within `uncompiled`: inside, what the user has compiled runs compiled, unless another context is entered, too."""
    with _stance:
        alone = len(_uncompiled) == 1
    if not alone:
        yield
        return
    _end()
    try:
        yield
    finally:
        _begin()


def _begin() -> None:
    with _stance:
        _uncompiled.append(_uncompiled[0] if _uncompiled else torch.compiler.set_stance("force_eager"))


def _end() -> None:
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


def compiler_of(module: nn.Module) -> Compiler | None:
    """What compiles a function as the user has compiled ``module``; None where it is not compiled.

    ``torch.compile`` gives its arguments to an object that a wrapper keeps, and what was compiled in place closes over.
    """
    if is_compiled_wrapper(module):
        return module.dynamo_ctx  # type: ignore[return-value]
    call = module._compiled_call_impl
    return compiler_of_function(call) if isinstance(call, types.FunctionType) else None


def own_frame(call: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, of a module with this ``forward``, as what its compiler begins with.

    It passes over frames of torch's own modules, and would begin within functions that these call. Where it is given
    one of the user's it begins there, once for all modules of a class; here each has code, hence a cache, of its own.
    """
    if not getattr(forward, "__module__", "").startswith("torch.nn."):
        return call

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    called.__code__ = called.__code__.replace(co_varnames=called.__code__.co_varnames)  # a copy
    return called


def as_written(function: Any) -> Any:
    """``function`` before any ``torch.compile``."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


def compiler_of_function(function: types.FunctionType) -> Compiler | None:
    """As `compiler_of`, of what ``torch.compile`` made of a function."""
    names = function.__code__.co_freevars
    if not hasattr(function, "_torchdynamo_orig_callable") or "self" not in names or function.__closure__ is None:
        return None
    found: Compiler = function.__closure__[names.index("self")].cell_contents
    return found


def forget_traced() -> None:
    """Let what has traced graphs forget the tensors that it met: its weak references keep them from being swapped.

    What traces numbers tensors by them, and hangs on graphs for as long as a backend keeps these.
    """
    if not is_loaded():
        return
    from torch._subclasses.meta_utils import MetaTensorDescriber

    for describer in [x for x in gc.get_objects() if type(x) is MetaTensorDescriber]:
        describer.lookup_tensor = type(describer.lookup_tensor)()
