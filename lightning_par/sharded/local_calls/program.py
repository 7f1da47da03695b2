"""What a tape noted, as a function of plain tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_par.private.tensors import make_wrapper_subclass
from lightning_par.sharded.local_calls.form import Form
from lightning_par.sharded.local_calls.tape import Item, Name, Shard
from lightning_par.sharded.tensor import ShardedTensor

_WRITTEN = (int, bool, str, type(None))
_ITEM = re.compile(r"[at]\d+")


def shard(local: Tensor, form: Form) -> ShardedTensor:
    """The sharded tensor of a result, made where no mode looks, of a part that is no leaf of its own."""
    x: ShardedTensor = make_wrapper_subclass(ShardedTensor, form.shape, dtype=form.dtype, device=form.device)
    x._local, x._dim, x._positions, x._axis, x._form = local, form.dim, form.positions, form.axis, form
    if form.strides is not None:
        x._strides = form.strides
    return x


class Source:
    """Writes values of items as Python, and keeps what has no text.

    Args:
        renamed: other names for tensors.

    Attributes:
        names: what the text refers to.
    """

    def __init__(self, renamed: dict[str, str] | None = None) -> None:
        self.renamed = renamed or {}
        self.names: dict[str, Any] = {"shard": shard}
        self._known: dict[int, str] = {}

    def text(self, value: Any) -> str:
        if isinstance(value, Name):
            return self.renamed_text(value.text)
        if isinstance(value, Shard):
            return f"shard({self.text(value.part)}, {self.constant(value.form)})"
        if type(value) is tuple:
            return f"({''.join(f'{self.text(x)}, ' for x in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self.text, value))}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self.text(x)}' for key, x in value.items())}}}"
        if type(value) is slice:
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return repr(value) if type(value) in _WRITTEN else self.constant(value)

    def renamed_text(self, text: str) -> str:
        return self.renamed.get(text, text)

    def constant(self, value: Any) -> str:
        name = self._known.setdefault(id(value), f"c{len(self._known)}")
        self.names[name] = value
        return name

    def line(self, item: Item) -> str:
        given = [*map(self.text, item.args), *(f"{key}={self.text(x)}" for key, x in item.kwargs.items())]
        return f"{item.out} = {self.constant(item.run)}({', '.join(given)})"

    def function(self, parameters: Sequence[str], lines: Sequence[str], result: str) -> Callable[..., Any]:
        body = "".join(f"    {line}\n" for line in lines)
        text = f"def run({', '.join(parameters)}):\n{body}    return {result}\n"
        exec(compile(text, "<what a rule came to>", "exec"), self.names)
        run: Callable[..., Any] = self.names.pop("run")
        return run


def used_in(value: Any) -> set[str]:
    """The names of inputs and items in ``value``."""
    if isinstance(value, Name):
        return set(_ITEM.findall(value.text))
    if isinstance(value, Shard):
        return used_in(value.part)
    if type(value) is slice:
        return used_in([value.start, value.stop, value.step])
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(used_in, value)) if isinstance(value, (tuple, list)) else set()


def needed(items: Sequence[Item], result: Any) -> list[Item]:
    """The ``items`` that ``result`` is made of, or that talk to other ranks."""
    wanted = used_in(result)
    kept = []
    for item in reversed(items):
        if item.kind != "function" or item.out in wanted:
            kept.append(item)
            wanted |= used_in(item.args) | used_in(item.kwargs)
    return kept[::-1]


def program(parameters: Sequence[str], items: Sequence[Item], result: Any) -> Callable[..., Any]:
    """A function that does what ``items`` say, and gives ``result``."""
    source = Source()
    lines = [source.line(item) for item in needed(items, result)]
    return source.function(parameters, lines, source.text(result))
