"""Parameters in whose memory other tensors lie, too: what is written into one of them is written into the other.

A weight tied by ``b.data = a.data``, parameters that are views of a flat one, an attribute ``self.row = weight[0]``:
parts of them would go their own ways, so such a parameter stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS
from lightning_par.private.storage import memory_of
from lightning_par.sharded.packed_parameters import is_packed
from lightning_par.sharded.tensor import ShardedTensor

_DEPTH = 3  # of lists and dicts within each other that are looked at


def overlapping(module: nn.Module, holders: Iterable[Any] = ()) -> dict[str, str]:
    """What each parameter that lies in memory of others, too, shares it with, by its first name.

    Args:
        module: its parameters, buffers, and the tensors that are attributes of its modules are looked at.
        holders: other objects whose attributes are, as callbacks.

    Example::

        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        assert overlapping(model) == {}
        model[1].weight.data = model[0].weight.data
        assert overlapping(model)["0.weight"] == "1.weight"
    """
    names = {id(p): name for name, p in reversed(list(module.named_parameters(remove_duplicate=False)))}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, x in [*module.named_parameters(), *module.named_buffers(), *_attributes(module, holders)]:
        away = isinstance(x, ShardedTensor) or is_elsewhere(x) or is_packed(x)
        if not away and x.layout == torch.strided and x.numel():
            found.setdefault(id(x), (name, x))
    runs: dict[Any, list[tuple[int, int, str, int]]] = {}
    for key, (name, x) in found.items():
        memory, start, stop = _run(x)
        runs.setdefault(memory, []).append((start, stop, name, key))
    shared: dict[str, str] = {}
    for several in runs.values():
        end, last = -1, ("", 0)
        for start, stop, name, key in sorted(several):
            if start < end:
                for one, other in (((name, key), last), (last, (name, key))):
                    if one[1] in names:
                        shared.setdefault(names[one[1]], names.get(other[1], other[0]))
            if stop > end:
                end, last = stop, (name, key)
    return shared


def _run(x: Tensor) -> tuple[Any, int, int]:
    """The memory that ``x`` lies in, and from which byte to which; on a device all lies in one."""
    size, offset = x.element_size(), int(x.storage_offset())
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    if isinstance(x, Deferred) or x.device.type == "meta":
        memory = memory_of(x.meta if isinstance(x, Deferred) else x)
        return memory, offset * size, (offset + reach) * size
    return x.device, x.data_ptr(), x.data_ptr() + reach * size


def _attributes(module: nn.Module, holders: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in (PARAMETERS, BUFFERS, MODULES):
                yield from _held(f"{path}.{name}" if path else name, value, _DEPTH)
    for holder in holders:
        for name, value in getattr(holder, "__dict__", {}).items():
            yield from _held(f"{type(holder).__name__}.{name}", value, _DEPTH)


def _held(name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple | set) and depth:
        for item in value:
            yield from _held(name, item, depth - 1)
    elif isinstance(value, dict) and depth:
        for key, item in value.items():
            yield from _held(f"{name}[{key!r}]", item, depth - 1)
