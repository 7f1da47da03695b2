"""Parameters in whose memory other tensors lie, too: what is written into one of them is written into the other.

A weight tied by ``b.data = a.data``, parameters that are views of a flat one, an attribute ``self.row = weight[0]``:
parts of them would go their own ways, so such a parameter stays whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS
from lightning_par.private.storage import memory_of
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.user_code import has_attributes, slots_of
from lightning_par.sharded.packed_parameters import is_packed
from lightning_par.sharded.tensor import ShardedTensor

_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST = 100_000  # containers and objects that are looked into


def overlapping(module: nn.Module, holders: Iterable[Any] = ()) -> dict[str, str]:
    """What each parameter that lies in memory of others, too, shares it with, by its first name.

    Args:
        module: its parameters, buffers, and the tensors that its modules' attributes lead to are looked at.
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
    waiting: deque[tuple[str, Any]] = deque()
    for path, child in module.named_modules():
        held = [(name, value) for name, value in vars(child).items() if name not in (PARAMETERS, BUFFERS, MODULES)]
        waiting.extend((f"{path}.{name}" if path else name, value) for name, value in held)
    for holder in holders:
        held = [*getattr(holder, "__dict__", {}).items()]
        waiting.extend((f"{type(holder).__name__}.{name}", value) for name, value in held)
    return _held(waiting)


def _held(waiting: deque[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in containers and in the attributes of plain objects, what is nearest first."""
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        name, value = waiting.popleft()
        if isinstance(value, Tensor):
            yield name, value
        elif type(value) not in ATOMS and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_inside(name, value))


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, _CONTAINERS):
        return [(name, x) for x in value if type(x) not in ATOMS]
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", x) for key, x in value.items() if type(x) not in ATOMS]
    if not has_attributes(value):
        return []
    slots = [(key, slot.__get__(value)) for key, slot in slots_of(type(value)).items() if hasattr(value, key)]
    return [(f"{name}.{key}", x) for key, x in [*getattr(value, "__dict__", {}).items(), *slots]]
