"""Autograd's graph: its nodes, and the backward that runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running now has ended; must be called from within one of its hooks.

    A ``loss.backward()`` of the user's own passes no hook of Lightning. FSDP2 and DDP use the same call.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


Accumulation: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The kind of nodes at the ends of a graph, which add to the gradient of a leaf, their ``variable``. No public function
says which leaves a backward will reach."""


def function_of(kind: type) -> type | None:
    """The `torch.autograd.Function` whose nodes in a graph are of ``kind``; None of torch's own nodes."""
    return getattr(kind, "_forward_cls", None)


def is_known_node(node: Any) -> bool:
    """Whether ``node`` is of a function of torch's own, of which `kept_by_node` tells; those that others have written
    in C++ have a class in common."""
    return type(node).__name__ != "CppFunction"


def kept_by_node(node: Any) -> list[Tensor] | None:
    """The tensors that a node of a function of torch's own keeps for backward; None where it does not give them, as one
    that was written into since."""
    found: list[Tensor] = []
    try:
        for name in dir(type(node)):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                found += [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, Tensor)]
    except RuntimeError:
        return None
    return found


def gathered_by(node: Any) -> list[tuple[Tensor, int]]:
    """The parts of stored weights of which a node of a function that gathers them made the wholes, each with the number
    of that."""
    several: list[tuple[Tensor, int]] | None = getattr(node, "gathered", None)
    if several is not None:
        return several
    part: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return [] if part is None else [(part, 0)]


def node_of(x: Tensor) -> Any:
    """The node of autograd's graph that made ``x`` itself, whatever its class says of ``grad_fn``."""
    attribute: Any = torch._C.TensorBase.grad_fn
    return attribute.__get__(x)


def asker_of_node(frame: FrameType) -> FrameType:
    """The frame of who asks for a node, which that of ``frame`` reads: of `torch.autograd.graph.get_gradient_edge`, who
    calls it."""
    above = frame.f_back
    is_edge = (
        frame.f_code is _NODE_OF
        and above is not None
        and above.f_code is torch.autograd.graph.get_gradient_edge.__code__
    )
    return above.f_back or frame if is_edge and above is not None else frame


_NODE_OF = torch.autograd.graph._get_grad_fn_or_grad_acc.__code__


class NodeStand(Node):
    """What stands for a node of autograd's graph; all that there is to ask of that is asked of the real one.

    Args:
        node: the real one.
    """

    def __init__(self, node: Any) -> None:
        self.node = node

    def name(self) -> str:
        return cast(str, self.node.name())

    @property
    def metadata(self) -> Any:  # type: ignore[override]
        return self.node.metadata

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return cast("tuple[tuple[Any, int], ...]", self.node.next_functions)

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        return self.node.register_hook(fn)

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        return self.node.register_prehook(fn)

    def _sequence_nr(self) -> int:
        return order_of(self.node)

    @property
    def _input_metadata(self) -> list[Any]:
        return cast("list[Any]", self.node._input_metadata)

    def _register_hook_dict(self, tensor: Tensor) -> None:
        self.node._register_hook_dict(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def __eq__(self, other: object) -> bool:
        return self.node is (other.node if isinstance(other, NodeStand) else other)

    def __hash__(self) -> int:
        return hash(self.node)

    def __repr__(self) -> str:
        return repr(self.node)

    def __dir__(self) -> list[str]:
        return dir(self.node)


def made_by(x: Tensor) -> Any:
    """The node of autograd's graph that made ``x``; None where it is in no graph.

    Of a view that was made without gradients torch refuses to say so once its memory has been written into, as by
    ``weight[0].zero_()`` within ``no_grad``: code that uses it with gradients is then refused by torch itself.
    """
    try:
        return node_of(x) if type(x) in _PLAIN else x.grad_fn  # the property's patch is for user code
    except RuntimeError:
        return None


_PLAIN = (Tensor, torch.nn.Parameter)


def can_order_nodes() -> bool:
    """Whether `set_order` does anything."""
    return hasattr(torch.autograd.function.BackwardCFunction, "_set_sequence_nr")


def order_of(node: Any) -> int:
    """A node's place in the order of nodes: backward runs, of those that are ready, the one with the highest."""
    place: int = node._sequence_nr()
    return place


def set_order(node: Any, place: int) -> None:
    """Move a node in that order; several may have one place. No public function does."""
    node._set_sequence_nr(place)


def in_backward() -> bool:
    """Whether a backward runs in this thread, as in a hook of a tensor."""
    return current_backward() != -1


def current_backward() -> int:
    """The number of the backward that runs in this thread, the innermost; -1 where none does."""
    return torch._C._current_graph_task_id()


def is_asked_for(node: Any) -> bool:
    """Whether the backward that runs in this thread comes to ``node``, of the graph behind where it is now."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` is to give
        return True


def preserve_version(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, writes into ``x`` are not counted."""
    return torch.autograd._unsafe_preserve_version_counter(x)


def saves_for_python() -> bool:
    """Whether what is now saved for backward is of a `torch.autograd.Function`, whose backward may read it as often as
    it likes; torch's own nodes read it once a pass. For functions that a hook of saved tensors calls itself."""
    frame = sys._getframe(2).f_back
    return frame is None or frame.f_code is _APPLY  # in a thread of autograd's it is not known


def autograd_function(until: Container[CodeType]) -> FrameType | None:
    """The call of a `torch.autograd.Function` in which the caller was called, unless it is further up than one of the
    codes ``until``."""
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code not in until:
        if frame.f_code is _APPLY:
            return frame
        frame = frame.f_back
    return None


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # before anybody replaces it


def checkpoint_generator() -> tuple[Any, str]:
    """Where non-reentrant checkpointing finds the generator function behind it, a module and a name; its first argument
    is what is run, and run again, of which torch tells nobody."""
    return torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def checkpointing_as(generator: Callable[..., Any], reentrant: Callable[..., Any]) -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint` goes by these, of which torch has no public place.

    Args:
        generator: takes the place of what `checkpoint_generator` finds, with the same arguments.
        reentrant: takes that of the reentrant kind's function: what to run, whether to put generators back, and the
            arguments.
    """
    module, name = checkpoint_generator()
    before = getattr(module, name), module.CheckpointFunction
    setattr(module, name, generator)
    module.CheckpointFunction = SimpleNamespace(apply=reentrant)
    try:
        yield
    finally:
        setattr(module, name, before[0])
        module.CheckpointFunction = before[1]


KEEPS_ARGUMENTS: Any = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
"""The autograd function by whose node non-reentrant checkpointing keeps what a region is run again on; it computes
nothing. torch 2.13 has none."""
