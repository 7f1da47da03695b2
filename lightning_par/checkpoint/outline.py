"""A checkpoint taken apart for a directory: tensors by name, and what is left, from which it can be put together.

Names are those of Lightning's and torch's own directories: ``state_dict.<name>``, and ``optimizer_0.state.<name of the
parameter>.exp_avg``, so that torch's tools find what they look for. What is left goes into Lightning's ``meta.pt``,
with tensors on ``meta`` where others were taken out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.unread import Unread
from lightning_par.private.storage import memory_of

OWN = "lightning_par"
"""The entry of a checkpoint that plain Lightning does not write, and does not read."""
STATES = ("state_dict", "optimizer_states")
Path = tuple[str | int, ...]


@dataclass
class Outline:
    """A checkpoint taken apart.

    Args:
        rest: what is left of it, with all that is needed to put it together.
        tensors: by name.
        aliases: other names of them, as tied weights have.
        values: by name, what torch's tools look for among the tensors that is none.
        paths: where things by name are in a nested dict, as torch's tools build it.
    """

    rest: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def name(self, path: Path) -> str:
        """A new name for what is at ``path``."""
        name = ".".join(map(str, path))
        while name in self.paths:  # {"a.b": x, "a": {"b": y}}
            name += "'"
        self.paths[name] = path
        return name


def take_apart(checkpoint: Mapping[str, Any], parameters: Sequence[Mapping[int, str]]) -> Outline:
    """The outline of ``checkpoint``.

    Args:
        checkpoint: as Lightning makes it.
        parameters: for each optimizer, the names of its parameters by their id.

    Example::

        outline = take_apart({"state_dict": {"weight": torch.ones(2)}, "epoch": 1}, [])
        assert outline.rest["epoch"] == 1 and [*outline.tensors] == ["state_dict.weight"]
    """
    outline, names = Outline(), []
    own = dict(checkpoint.get(OWN, {}))
    memory: dict[Any, str] = {}

    def note(x: Tensor, path: Path) -> Tensor:
        if x.layout != torch.strided or x.is_quantized or not (path[0] in STATES or isinstance(x, Unread)):
            return x
        name = outline.name(_by_name(path, parameters))
        first = memory.setdefault(_memory_of(x), name)
        if first == name:
            outline.tensors[name] = x
        else:
            outline.aliases[name] = first
        names.append(first)
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    for key in STATES:
        if key in checkpoint:
            own[key] = _walked(checkpoint[key], (key,), note)
    for key, value in checkpoint.items():
        if key not in (*STATES, OWN):
            outline.rest[key] = _walked(value, (key,), note)
    outline.rest[OWN] = {**own, "tensors": names, "order": [*checkpoint]}
    for path, value in _values(own, parameters):
        outline.values[outline.name(_by_name(path, parameters))] = value
    return outline


def names_in(rest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that were taken out of ``rest``, by name, as ones on ``meta``.

    Raises:
        KeyError: ``rest`` was not made by `take_apart`.
    """
    found: list[Tensor] = []
    _put(rest, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return dict(zip(rest[OWN]["tensors"], found, strict=True))


def put_together(rest: Mapping[str, Any], tensors: Callable[[str], Tensor]) -> dict[str, Any]:
    """The checkpoint of which ``rest`` is left; the inverse of `take_apart`."""
    names = iter(rest[OWN]["tensors"])
    whole = _put(rest, lambda _: tensors(next(names)))
    own = whole[OWN]
    whole.update({key: own.pop(key) for key in STATES if key in own})
    order = own.pop("order")
    del own["tensors"]
    return {key: whole[key] for key in order if key in whole}


def _put(rest: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """``rest`` with ``function`` of every tensor that stands for another, in the order in which they were taken out."""

    def visit(x: Tensor, path: Path) -> Tensor:
        return function(x) if x.is_meta else x

    own = rest[OWN]
    states = {key: _walked(own[key], (key,), visit) for key in STATES if key in own}
    others = {key: _walked(value, (key,), visit) for key, value in rest.items() if key != OWN}
    return {**others, OWN: {**own, **states}}


def _walked(value: Any, path: Path, visit: Callable[[Tensor, Path], Any]) -> Any:
    """``value`` with ``visit(x, path of x)`` for every tensor in its dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return visit(value, path)
    if type(value) in (dict, OrderedDict):
        new = type(value)((key, _walked(x, (*path, key), visit)) for key, x in value.items())
        vars(new).update(vars(value)) if type(value) is OrderedDict else None  # as `_metadata` of a module's
        return new
    if type(value) in (list, tuple):
        return type(value)(_walked(x, (*path, i), visit) for i, x in enumerate(value))
    return value


def _by_name(path: Path, parameters: Sequence[Mapping[int, str]]) -> Path:
    """Where torch's tools have what is at ``path`` in Lightning's file; keys of dicts are strings there."""
    if path[0] != "optimizer_states" or len(path) < 2 or not isinstance(path[1], int):
        return tuple(map(str, path))
    head, rest = f"optimizer_{path[1]}", path[2:]
    if len(rest) > 1 and rest[0] == "state" and path[1] < len(parameters):
        rest = ("state", parameters[path[1]].get(rest[1], str(rest[1])), *map(str, rest[2:]))  # type: ignore[arg-type]
    return (head, *rest)


def _memory_of(x: Tensor) -> Any:
    if isinstance(x, Unread):
        return id(x.memory)
    # empty ones, and those without values, have no address
    return x.untyped_storage().data_ptr() or memory_of(x), x.storage_offset(), x.shape, x.stride(), x.dtype


def _values(own: Mapping[str, Any], parameters: Sequence[Mapping[int, str]]) -> Iterable[tuple[Path, Any]]:
    """What is no tensor: in the module's state, in a parameter's, and the options of param groups."""
    for key, x in own.get("state_dict", {}).items():
        if not isinstance(x, (Tensor, dict, list, tuple)):
            yield ("state_dict", key), x
    for i, state in enumerate(own.get("optimizer_states", ())):
        if not isinstance(state, dict):
            continue
        states = state.get("state", {})
        for key, values in states.items() if isinstance(states, dict) else ():
            for name, x in values.items() if isinstance(values, dict) else ():
                if not isinstance(x, (Tensor, dict, list, tuple)):
                    yield ("optimizer_states", i, "state", key, name), x
        for j, group in enumerate(state.get("param_groups", ())):
            names = parameters[i] if i < len(parameters) else {}
            for name, x in group.items():
                value = [names.get(key, str(key)) for key in x] if name == "params" else x
                if not isinstance(x, Tensor):
                    yield ("optimizer_states", i, "param_groups", j, name), value
