"""A graph that ``torch.compile`` captured of the user's code, as one device sees it, run on this rank's parts.

The compiler's front end reads the user's Python, with guards on all that it read, and hands on a graph of torch
functions of whole tensors. Here their rules run once, for tensors that lie as these do: what they come to is plain
functions of parts, in runs between the verbs that move tensors. Each run goes to the backend that the user has chosen,
which sees plain tensors alone, as in a layer that is split by hand. What is unclear stays with its rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from lightning_par.private.compiler import is_higher_order
from lightning_par.sharded.aliases import Memory, is_among
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.gradient_shares import unshared
from lightning_par.sharded.local_calls.program import Source, needed, used_in
from lightning_par.sharded.local_calls.repeated_calls import Call, is_unwatched, surroundings
from lightning_par.sharded.local_calls.tape import Item, Name, Tape, UnclearError
from lightning_par.sharded.rules.stored_weights import gathering_of
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.memo import Memo

_MOST = 8
"""Programs of one graph, as many as torch makes of one function by itself; then its functions run by their rules."""


class CompiledGraph:
    """What the compiler's front end calls in place of the user's code.

    Args:
        graph: captured, of whole tensors.
        backend: the user's.
    """

    def __init__(self, graph: fx.GraphModule, backend: Callable[..., Any]) -> None:
        self.graph = graph
        self.backend = backend
        self.programs: Memo[Any, Callable[..., Any] | None] = Memo(most=_MOST + 1)
        self._whole: Callable[..., Any] | None = None
        self._clear = all(map(_is_clear, graph.graph.nodes))

    def __call__(self, *args: Any) -> Any:
        if not self._clear or not is_unwatched():
            return self.graph(*args)
        args = tuple(gathering_of(x).gathered(x) if _is_stored(x) else x for x in args)
        call = Call(None)
        if not call.add(args) or is_among(call.tensors):
            return self.graph(*args)
        if call.axis is None:
            if self._whole is None:
                self._whole = torch.compile(self.graph, backend=self.backend)
            return self._whole(*args)
        key = (*call.key, *surroundings(call.tensors[0]))
        if key not in self.programs:
            if len(self.programs) >= _MOST:
                return self.graph(*args)
            result, self.programs[key] = self._noted(args, call.tensors)
            return result
        program = self.programs[key]
        return self.graph(*args) if program is None else program(*call.tensors)

    def _noted(self, args: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Callable[..., Any] | None]:
        names = [f"a{number}" for number in range(len(tensors))]
        tape, before = Tape(dict(zip(names, tensors, strict=True)), views=True), Memory.made_ever
        with tape:
            result = self.graph(*args)
        if tape.unclear or Memory.made_ever != before:
            return result, None
        try:
            return result, compiled(names, tape.items, tape.described(result), self.backend)
        except UnclearError:
            return result, None


def _is_clear(node: fx.Node) -> bool:
    """Whether all that ``node`` does shows in what it returns."""
    if node.op in ("placeholder", "output"):
        return True
    return node.op in ("call_function", "call_method") and len(node.users) > 0


def may_be_split(graph: fx.GraphModule) -> bool:
    """Whether its functions are told to tensors that are sharded; code within code is not."""
    return not any(node.op in ("call_module", "get_attr") or is_higher_order(node.target) for node in graph.graph.nodes)


def _is_stored(x: Any) -> bool:
    return isinstance(x, ShardedTensor) and x._axis.stores


def compiled(names: Sequence[str], items: Sequence[Item], result: Any, backend: Any) -> Callable[..., Any]:
    """A function of plain tensors that does what ``items`` say, its functions compiled in runs."""
    steps = [list(run) for _, run in groupby(needed(items, result), _kind())]
    source = Source()
    lines: list[str] = []
    for number, step in enumerate(steps):
        if step[0].kind != "function":
            lines += map(source.line, step)
            continue
        later = {text for item in (x for other in steps[number + 1 :] for x in other) for text in _texts(item)}
        lines.append(_segment(source, f"s{number}", step, later | set(_names(result)), backend))
    return source.function(names, lines, source.text(result))


def _kind() -> Callable[[Item], Any]:
    """Runs of functions are one step each, everything else is a step of its own."""
    numbers = iter(range(1 << 62))
    return lambda item: None if item.kind == "function" else next(numbers)


def _segment(source: Source, name: str, items: list[Item], later: set[str], backend: Any) -> str:
    """The line that runs ``items``, compiled."""
    made = {item.out for item in items}
    used = list(dict.fromkeys(text for item in items for text in _texts(item)))
    given = [text for text in used if not used_in(Name(text)) <= made]
    out = sorted(text for text in later if used_in(Name(text)) <= made)
    source.names[name] = Segment(graph_of(items, given, out), backend)
    line = f"{name}({', '.join(map(source.renamed_text, given))})"
    made_here = {text: f"{name}_{number}" for number, text in enumerate(out)}
    source.renamed.update(made_here)
    return f"{', '.join(made_here.values())}, = {line}" if out else line


class Segment:
    """A run of plain functions, compiled when it is first called. What its tensors are like is known by then, and the
    same for each call."""

    def __init__(self, graph: fx.GraphModule, backend: Callable[..., Any]) -> None:
        self._graph, self._backend = graph, backend
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Tensor) -> Any:
        if self._compiled is None:
            with unshared(()):  # a backend may ask for gradients of what it traces
                self._compiled = self._backend(self._graph, list(args))
        return self._compiled(*args)


def graph_of(items: Sequence[Item], given: Sequence[str], out: Sequence[str]) -> fx.GraphModule:
    """The functions of ``items`` as a graph."""
    graph = fx.Graph()
    nodes = {text: graph.placeholder(f"p{number}") for number, text in enumerate(given)}

    def node(text: str) -> fx.Node:
        if text not in nodes:
            whole, _, number = text[:-1].rpartition("[")
            nodes[text] = graph.call_function(operator.getitem, (node(whole), int(number)))
        return nodes[text]

    def with_nodes(value: Any) -> Any:
        if isinstance(value, Name):
            return node(value.text)
        if type(value) in (tuple, list):
            return type(value)(map(with_nodes, value))
        if type(value) is dict:
            return {key: with_nodes(x) for key, x in value.items()}
        if type(value) is slice:
            return slice(*map(with_nodes, (value.start, value.stop, value.step)))
        return value

    for item in items:
        run, args = item.run, item.args
        if getattr(run, "__name__", "") == "__get__":
            run, args = getattr, (args[0], name_of(run))
        nodes[item.out] = graph.call_function(run, with_nodes(args), with_nodes(item.kwargs))
    graph.output(tuple(map(node, out)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _texts(item: Item) -> list[str]:
    return [*_names(item.args), *_names(item.kwargs)]


def _names(value: Any) -> list[str]:
    if isinstance(value, Name):
        return [value.text]
    if hasattr(value, "part"):
        return _names(value.part)
    if type(value) is slice:
        value = [value.start, value.stop, value.step]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for x in value for text in _names(x)] if isinstance(value, (tuple, list)) else []
