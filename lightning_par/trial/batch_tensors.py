"""The tensors of a batch, and what the user finds each of them by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from lightning_par.python_state.nested_tensors import tensors_in


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch of any structure, in the order in which a recording has them."""
    return tensors_in(batch)


def names_of(batch: Any) -> list[str]:
    """A name for each tensor of ``batch``, in the order in which it is traversed: its key, its place, or nothing."""
    names: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            names[id(value)] = name
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(item, f"{name}[{number}]")
        elif is_dataclass(value):
            for key in (one.name for one in fields(value) if hasattr(value, one.name)):
                walk(getattr(value, key), f"{name}.{key}" if name else key)

    walk(batch, "")
    # what is not walked through is of a class that is registered with torch as a node, as a TensorDict is
    return [names.get(id(x), f"[{number}]") for number, x in enumerate(tensors_of(batch))]
