"""``torch.compile`` of code that meets sharded tensors.

Its front end takes a sharded tensor for a whole one, by torch's protocol for tensors that wrap others, and guards on
how it is sharded. The graph that it captures runs on parts: `lightning_par.sharded.local_calls.compiled_graph`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, fx

from lightning_par.private import compiler
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.tensors import is_view
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sharded.functions import DRAWS, DRAWS_ANEW
from lightning_par.sharded.gradient_shares import unshared
from lightning_par.sharded.local_calls.compiled_graph import CompiledGraph, may_be_split
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.rules.draws import tells_no_draw
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.whole_draws import InexactDrawError


class CompiledGraphs:
    """The patch. It is in place once the compiler was loaded, which takes seconds, and is seen to at each step."""

    def __init__(self) -> None:
        self._wanted = False
        self._replacement: Replacement | None = None

    def install(self) -> None:
        self._wanted = True
        self.look()

    def look(self) -> None:
        """Called before a step."""
        if self._wanted and self._replacement is None and compiler.is_loaded():
            self._replacement = Replacement(compiler.graph_owner(), "call_user_compiler", _on_parts)
            self._replacement.install()
            for name, method in _PROTOCOL.items():
                setattr(ShardedTensor, name, method)

    def undo(self) -> None:
        self._wanted = False
        if self._replacement is not None:
            self._replacement.undo()
            self._replacement = None
            for name in _PROTOCOL:
                delattr(ShardedTensor, name)


def _flatten(x: ShardedTensor) -> tuple[list[str], Any]:
    return ["_whole" if isinstance(x, BatchTensor) else "_local"], None


def _as_whole(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Tensor:
    """What the front end computes shapes with."""
    (part,) = inner.values()
    return part.detach().new_empty_strided(size, stride).requires_grad_(part.requires_grad)


def _makes_fakes(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("torch._subclasses.", "torch._dynamo."))


def _of_wrapper(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, which tells those who make fake tensors of the wrapper itself, as whether two share memory."""

    def asked(x: ShardedTensor) -> Any:
        if _makes_fakes(sys._getframe(1)):
            with DisableTorchFunctionSubclass():
                return method(x)
        return method(x)

    return asked


def _stride(x: ShardedTensor, *dim: int) -> Any:
    """Guards compare the wrapper's strides, which are those of a tensor in order; code that reads others, as one device
    has them, runs as it is written."""
    told = Tensor.stride(x)
    if _makes_fakes(sys._getframe(1)):
        with DisableTorchFunctionSubclass():
            if Tensor.stride(x) != told:
                raise compiler.skip_frame("the tensor does not lie in order")
    return told[dim[0]] if dim else told


class _OfCompiler:
    """A method by which the compiler knows a wrapper. Others who ask torch whether this is one, as those who save
    models do, are to see one device's tensor."""

    def __init__(self, name: str, method: Callable[..., Any], static: bool = False) -> None:
        self.name, self.method, self.static = name, method, static

    def __get__(self, x: Any, kind: Any = None) -> Any:
        if not compiler.may_know(sys._getframe(1)):
            raise AttributeError(self.name)
        return self.method if self.static or x is None else partial(self.method, x)


_PROTOCOL: dict[str, Any] = {
    "__tensor_flatten__": _OfCompiler("__tensor_flatten__", _flatten),
    "__tensor_unflatten__": _OfCompiler("__tensor_unflatten__", _as_whole, static=True),
    "untyped_storage": _of_wrapper(Tensor.untyped_storage),
    "_is_view": _of_wrapper(is_view),
    "storage_offset": _of_wrapper(Tensor.storage_offset),
    "stride": _stride,
}


def _refuse_draws(graph: fx.GraphModule) -> None:
    """The user's backend has numbers of its own, which go by the graphs that it makes."""
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name in DRAWS | DRAWS_ANEW:
            if not tells_no_draw(name, node.args, node.kwargs):
                raise InexactDrawError(name, user_line(), "it is compiled, and compiled code draws numbers of its own")


def _on_parts(plain: Callable[..., Any], use: Use) -> Callable[..., Any]:
    def call_user_compiler(self: Any, graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        sharded = any(isinstance(x, ShardedTensor) for x in example_inputs)
        if use.on and RunState.current.streams.whole:
            _refuse_draws(graph)
        if not use.on or not (sharded or RunState.current.shared):
            return plain(self, graph, example_inputs)
        if sharded:
            if not may_be_split(graph):
                raise compiler.skip_frame("it has code within code, which rules are not told of")
            return CompiledGraph(graph, self.compiler_fn)
        with unshared(()):  # as in `compiled_graph.Segment`
            return plain(self, graph, example_inputs)

    return call_user_compiler
