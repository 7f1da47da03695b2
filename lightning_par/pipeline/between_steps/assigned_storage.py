"""Tensors of all ranks that user code, between two steps, made the memory of a weight or gradient of some of them.

After ``p.data = w`` or ``p.grad = g`` the two have one memory on one device, so that w moves as p is trained. On ranks
that don't hold p, w and all that shares its memory is a replica: it is given p's values wherever these may have
changed, until nothing else refers to that memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.broadcast import Kind, kind_of, send_to_all
from lightning_par.pipeline.between_steps.remote_gradient import Gradient
from lightning_par.pipeline.between_steps.remote_weight import copied
from lightning_par.pipeline.between_steps.send_away import away_of
from lightning_par.pipeline.between_steps.weight_reads import sent
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.storage import is_shared, memory_of
from lightning_par.sharded.identity import become
from lightning_par.sharded.rules.gather_report import user_line

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients


_Place = tuple[int, int, int]  # in which memory a tensor lies, from where to where


@dataclass(frozen=True)
class _Replica:
    name: str
    source: int  # the rank that sends it
    current: Callable[[], Tensor | None]  # the weight or gradient, where it is
    kind: Kind
    memory: int  # of what was given
    given: Tensor | None  # None where the weight or gradient itself has its memory
    place: _Place | None


class Replicas:
    """Who shares memory with the weights and gradients of ``owner``, where user code sets ``data`` and ``grad``.

    Example::

        replicas = Replicas(gradients)
        replicas.set_data(module.layer.weight, w)
        replicas.refresh()  # w has the weight's values on all ranks
    """

    def __init__(self, owner: JointGradients) -> None:
        self._owner, self._axis = owner, owner.axis
        self._noted: dict[tuple[str, object], _Replica] = {}
        self._taken: dict[object, str] = {}  # by the memory of a copy, the first weight that has it now
        self._of_parts: dict[str, Tensor] = {}  # what the data of weights was set to, of which no rank has all
        self._away: list[object] = []  # memory of copies that weights on other ranks have now

    def set_data(self, x: Any, value: Any) -> None:
        """``x.data = value``, where ``x`` is shown. All ranks must call it, as the following ones.

        Raises:
            NotImplementedError: ``value`` has the memory of a weight that is on other ranks than ``x``.
        """
        name, given = self._owner.name_of(x), value
        if isinstance(value, Gradient):
            self._refuse_others("data", name, value.of)
            given, value = None, value if value.here is None else value.here
        elif self._owner.is_weight(value):
            given = self._shared(name, value)
        type(x)._plain.data.__set__(x, value if given is None or not is_elsewhere(value) else given)
        held = weakref.ref(x)
        if name in self._owner.in_parts:
            if isinstance(given, Tensor) and not is_elsewhere(given):
                self._of_parts[name] = given.data
        elif isinstance(given, Tensor):
            self._note(("data", id(x)), name, lambda: None if is_elsewhere(held()) else held(), value)

    def set_gradient(self, name: str, value: Any) -> None:
        """``value`` was made the gradient of the parameter ``name``, or its ``data``.

        Raises:
            NotImplementedError: it is the gradient of a parameter on other ranks.
        """
        if isinstance(value, Gradient):
            self._refuse_others("grad", name, value.of)
        elif isinstance(value, Tensor) and not self._owner.is_weight(value):
            self._note(("grad", name), name, lambda: self._owner.held(name), value)

    def lend(self, x: Tensor, value: Any) -> None:
        """``x.data = value``, where ``value`` is shown, and ``x`` is not: from now on it is one of its views."""
        name = self._owner.name_of(value)
        if is_elsewhere(value):
            become(x, away_of(x, value.origin, like=value), name)
        else:
            torch.Tensor.data.__set__(x, value)  # type: ignore[attr-defined]
        self._owner.show(x, name, copied(value))

    def _shared(self, name: str, value: Any) -> Tensor | None:
        """What has the values of ``value`` here, where ranks of ``name`` share its memory with others; else None."""
        other = self._owner.name_of(value)
        if self._owner.holders_of(name) == self._owner.holders_of(other):
            self._taken.setdefault(copied(value), name)
            return None
        memory = copied(value)
        if memory is None:
            self._refuse_others("data", name, other)
        first = self._taken.setdefault(memory, name)
        if self._owner.holders_of(first) != self._owner.holders_of(name):
            self._refuse_others("data", name, first)
        self._away.append(memory)
        return sent(self._owner, "data", value)

    def refuse_write(self, name: str, x: Any) -> None:
        """Of a copy whose memory is now on ranks other than those of the weight that it was copied from.

        Raises:
            NotImplementedError: ``x`` is one.
        """
        if any(memory is copied(x) for memory in self._away if memory is not None):
            raise NotImplementedError(
                f"{user_line()}: `{name}` writes into a copy of {self._owner.name_of(x)!r} which was made the `data` "
                "of a weight on another stage of the pipeline. Write into that weight."
            )

    def _note(self, key: tuple[str, object], name: str, current: Callable[[], Tensor | None], given: Any) -> None:
        with DisableTorchFunctionSubclass():
            here, plain = current(), None if is_elsewhere(given) else given.data
            memory = memory_of(here if here is not None and plain is None else given)
            own = here is not None and memory_of(here) == memory
            place = None if plain is None else _place(plain)
        for other in self._noted.values() if key[0] == "data" else ():
            if other.name != name and _overlap(place, other.place):
                self._refuse_others("data", name, other.name)
        source = self._owner.sources[name]
        self._noted[key] = _Replica(name, source, current, kind_of(given), memory, None if own else plain, place)

    def _refuse_others(self, what: str, name: str, other: str) -> None:
        ranks, others = self._owner.holders_of(name), self._owner.holders_of(other)
        if ranks != others:
            raise NotImplementedError(
                f"{user_line()}: `{what}` of {name!r} is set to that of {other!r}. The pipeline has the first on ranks "
                f"{[*ranks]}, the other on {[*others]}: they can't share memory. Set it to a `clone()`."
            )

    def refresh(self) -> None:
        """Give all replicas the values of now. All ranks must call it; without replicas nothing is sent.

        Raises:
            NotImplementedError: something looks at a tensor that was made the data of a weight in parts.
        """
        of_parts, self._of_parts = self._of_parts, {}
        for name in of_parts:
            if is_shared(of_parts[name]):
                raise NotImplementedError(
                    f"The `data` of {name!r} was set to a tensor that is kept, which has its values from then on. They "
                    f"are on another stage of the pipeline, split there over the {self._owner.in_parts[name]} axis: no "
                    "rank has all of them. Set it to a `clone()`."
                )
        if not self._noted:
            return
        mine = [(self._has_memory(x), x.given is not None and is_shared(x.given)) for x in self._noted.values()]
        told = self._axis.all_gather_object(mine, "weights")
        for i, (key, x) in enumerate([*self._noted.items()]):
            if told[x.source][i][0] and any(answers[i][1] for answers in told):
                self._send(x)
            else:  # it has other memory by now, or nothing looks at the replicas
                del self._noted[key]

    def _has_memory(self, x: _Replica) -> bool:
        here = x.current()
        return x.given is None and here is not None and memory_of(here) == x.memory

    def _send(self, x: _Replica) -> None:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            values = send_to_all(x.current(), x.kind, x.source, self._axis, "weights")
            if x.given is not None:
                x.given.copy_(values)


def _place(x: Tensor) -> _Place:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else -1
    start = int(x.storage_offset())
    return memory_of(x), start, start + int(last)


def _overlap(a: _Place | None, b: _Place | None) -> bool:
    return a is not None and b is not None and a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2]
