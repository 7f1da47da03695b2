"""Tensors of all ranks that user code, between two steps, made the memory of a weight or gradient of some of them.

After ``p.data = w`` or ``p.grad = g`` the two have one memory on one device, so that w moves as p is trained. On ranks
that don't hold p, w and all that shares its memory is a replica: it is given p's values wherever these may have
changed, until nothing else refers to that memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.broadcast import Kind, kind_of, send_to_all
from lightning_par.pipeline.between_steps.gradients.remote_gradient import Gradient
from lightning_par.pipeline.between_steps.weights.remote_weight import copied
from lightning_par.pipeline.between_steps.weights.replicas_alone import Lying, looked_at
from lightning_par.pipeline.between_steps.weights.send_away import away_of
from lightning_par.pipeline.between_steps.weights.weight_reads import sent, values_here
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.storage import is_shared, memory_of
from lightning_par.sharded.aliases import innermost
from lightning_par.sharded.identity import become
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor

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
    lies: int | None  # where the weight or gradient itself lies since; None where it does not follow what was given
    given: Tensor | None  # None where the weight or gradient itself has its memory
    is_cut: bool  # whether this rank has a part of the weight, in memory that follows that of what was given
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
        self._away: list[object] = []  # memory of copies that weights on other ranks have now
        self._left: set[tuple[str, object]] = set()  # of what is noted: what was given other memory since, on all ranks

    def set_data(self, x: Any, value: Any) -> None:
        """``x.data = value``, where ``x`` is shown. All ranks must call it, as the following ones.

        Raises:
            NotImplementedError: ``value`` has the memory of a weight that is on other ranks than ``x``.
        """
        with RunState.current.writes_once():
            self._set_data(x, value)

    def _set_data(self, x: Any, value: Any) -> None:
        name, given = self._owner.name_of(x), value
        if isinstance(value, Gradient):
            self._refuse_others("data", name, value.of)
            given, value = None, value if value.here is None else value.here
        elif self._owner.is_weight(value):
            given = self._shared(name, value)
        plain = self.lying(given if given is None else value)  # before what is set has the weight's values
        self._set(x, value if given is None or not is_elsewhere(value) else given)
        held, key = weakref.ref(x), ("data", id(x))
        if isinstance(given, Tensor):
            self._note(key, name, lambda: None if is_elsewhere(held()) else held(), value, plain)
        elif key in self._noted:
            self._left.add(key)

    def _set(self, x: Any, value: Any) -> None:
        if isinstance(x, ShardedTensor):
            with self._owner.unseen():
                x.set_own_data(value)
        else:
            type(x)._plain.data.__set__(x, value)

    def set_gradient(self, name: str, value: Any, lies: Tensor | None) -> None:
        """``value``, which ``lies`` there, was made the gradient of the parameter ``name``, or its ``data``.

        Raises:
            NotImplementedError: it is the gradient of a parameter on other ranks.
        """
        if isinstance(value, Gradient):
            self._refuse_others("grad", name, value.of)
        elif isinstance(value, Tensor) and not self._owner.is_weight(value):
            self._note(("grad", name), name, lambda: self._owner.held(name), value, lies)
        else:
            self.leave([name])

    @staticmethod
    def lying(x: Any) -> Tensor | None:
        """Another tensor in the memory of ``x``, where this rank has that; to be asked before a weight or gradient is
        set to ``x``, which has the values of that from then on."""
        if not isinstance(x, Tensor) or isinstance(x, Gradient) or is_elsewhere(x):
            return None
        with DisableTorchFunctionSubclass():
            return x.data

    def leave(self, names: Iterable[str]) -> None:
        """The gradients of these parameters are no more what they were set to, on any rank."""
        self._left.update(key for name in names if (key := ("grad", name)) in self._noted)

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

    def _note(
        self, key: tuple[str, object], name: str, current: Callable[[], Tensor | None], given: Any,
        plain: Tensor | None,
    ) -> None:  # fmt: skip
        with DisableTorchFunctionSubclass():
            here = current()
            memory = memory_of(innermost(here if here is not None and plain is None else given))
            own = here is not None and memory_of(innermost(here)) == memory
            is_cut = not own and isinstance(here, ShardedTensor) and plain is not None
            follows = own or is_cut or _is_mirrored(here, plain)
            lies = memory_of(innermost(here)) if here is not None and follows else None
            place = None if plain is None else _place(plain)
        for other in self._noted.values() if key[0] == "data" else ():
            if other.name != name and _overlap(place, other.place):
                self._refuse_others("data", name, other.name)
        source = self._owner.sources[name]
        self._left.discard(key)
        kept = None if own else plain
        self._noted[key] = _Replica(name, source, current, kind_of(given), memory, lies, kept, is_cut, place)

    def _refuse_others(self, what: str, name: str, other: str) -> None:
        ranks, others = self._owner.holders_of(name), self._owner.holders_of(other)
        if ranks != others:
            raise NotImplementedError(
                f"{user_line()}: `{what}` of {name!r} is set to that of {other!r}. The pipeline has the first on ranks "
                f"{[*ranks]}, the other on {[*others]}: they can't share memory. Set it to a `clone()`."
            )

    def refresh(self) -> None:
        """Give all replicas the values of now. All ranks must call it; without replicas nothing is sent."""
        if not self._noted:
            return
        noted = [*self._noted.items()]
        mine = [(self._has_memory(x), x.given is not None and not x.is_cut and is_shared(x.given)) for _, x in noted]
        told = self._axis.all_gather_object(mine, "weights")
        stay = [told[x.source][i][0] and any(its[i][1] for its in told) for i, (_, x) in enumerate(noted)]
        for (key, x), stays in zip(noted, self._stay_alone() if self._axis.dry else stay, strict=True):
            if stays:
                self._send(x)
            else:  # it has other memory by now, or nothing looks at the replicas
                del self._noted[key]
        self._left.clear()

    def close(self) -> None:
        """The run ends: nothing is given values from now on, and nothing refers to weights, which may be swapped."""
        self._noted.clear()

    def _stay_alone(self) -> list[bool]:
        """Which replicas are given values, told by this rank alone."""
        lying = [self._lying(key, x) for key, x in self._noted.items()]
        return [x.stays and seen for x, seen in zip(lying, looked_at(lying, self._axis.size), strict=True)]

    def _lying(self, key: tuple[str, object], x: _Replica) -> Lying:
        holders = self._owner.holders_of(x.name)
        here = x.current() if self._has_memory(x) else None
        stays = here is not None
        if self._axis.rank not in holders:
            stays = key not in self._left and (key[0] == "data" or self._gradients_stay())
        return Lying(
            holders, x.memory, x.given, here if x.lies == x.memory else None, stays, x.name in self._owner.in_parts
        )

    def _gradients_stay(self) -> bool:
        """Whether gradients of other ranks are what they were set to: as those here are, if some were set."""
        rank, holders = self._axis.rank, self._owner.holders_of
        here = [x for key, x in self._noted.items() if key[0] == "grad" and rank in holders(x.name)]
        return any(map(self._has_memory, here)) if here else self._owner.alone.are_there()

    def _has_memory(self, x: _Replica) -> bool:
        here = x.current()
        return here is not None and memory_of(innermost(here)) == x.lies

    def _send(self, x: _Replica) -> None:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            here = values_here(x.current()) if self._axis.rank == x.source else None
            values = send_to_all(here, x.kind, x.source, self._axis, "weights")
            if x.given is not None and not x.is_cut:
                x.given.copy_(values)


def _is_mirrored(here: Tensor | None, given: Tensor | None) -> bool:
    """Whether ``given``, which has values, was made the memory of what has none, as weights in a dry run: of a fake."""
    return isinstance(here, FakeTensor) and given is not None and not isinstance(given, FakeTensor)


def _place(x: Tensor) -> _Place:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else -1
    start = int(x.storage_offset())
    return memory_of(x), start, start + int(last)


def _overlap(a: _Place | None, b: _Place | None) -> bool:
    return a is not None and b is not None and a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2]
