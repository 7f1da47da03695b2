"""The tensor whose values are still to be computed: it has shape, dtype and device, and no memory.

What is done to it is kept, also after the module was built: a cast, a cut or a checkpoint's values are then part of
what is computed in the end. Code that needs values, as ``item()`` does, gets those of a computation of its own.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_par.absent.base import AbsentTensor
from lightning_par.absent.deferred.history import Allocation, History, Ref, Store
from lightning_par.absent.deferred.replay import regions_of, values
from lightning_par.absent.deferred.session import Session
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.file import File


class UndeferrableError(RuntimeError):
    """The code needs the tensor's memory itself; the module has to be built whole."""


class Deferred(AbsentTensor):
    """A tensor whose values are still to be computed.

    Args:
        store: what was done to its memory.
        meta: lies in its (absent) memory as this tensor will; for this object alone.

    Example::

        with Session():
            weight = torch.zeros(1000, 1000)
        assert isinstance(weight, Deferred) and torch.equal(weight.value(), torch.zeros(1000, 1000))
    """

    _facts: tuple[Store, Tensor]
    no_storage = True
    """Says, where any tensor may be met, that this one has no memory to ask for; see `private.storage.storage_of`."""

    @staticmethod
    def __new__(cls, store: Store, meta: Tensor, requires_grad: bool = False) -> Deferred:
        geometry = dict(strides=meta.stride(), storage_offset=meta.storage_offset(), requires_grad=requires_grad)
        self = cls._standing((store, meta), meta.shape, meta.dtype, store.history.allocation.device, **geometry)
        if Session.current is not None:
            Session.current.add(self)
        return self

    @property
    def store(self) -> Store:
        """What was done to its memory."""
        return self._facts[0]

    @property
    def meta(self) -> Tensor:
        """A tensor on ``meta`` of its geometry; one memory there for each store."""
        return self._facts[1]

    def ref(self) -> Ref:
        """The tensor as it stands now."""
        return Ref(self.store.history, Geometry.of(self.meta))

    def value(self) -> Tensor:
        """Its values, computed anew in memory of their own."""
        return values([self.ref()])[0]

    def digest(self) -> str:
        """A hash of all that decides its values but the content of `files`: where that is the same on two ranks, so
        are they."""
        return self.ref().digest()

    def files(self) -> list[File]:
        """The mapped files on whose content its values depend."""
        return [*dict.fromkeys(region.file for region in regions_of([self.ref()]))]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from lightning_par.absent.deferred.op_recorder import record

        return record(func, args, kwargs or {})

    def take_over(self, other: Deferred) -> None:
        """Share memory with ``other`` from now on, and lie in it as ``other`` does."""
        meta = other.meta.detach()
        torch.Tensor.data.__set__(self, Deferred(other.store, meta))  # type: ignore[attr-defined]
        self._facts = (other.store, meta)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.take_over(value if isinstance(value, Deferred) else holding(value))

    def data_ptr(self) -> int:
        return 0

    def tolist(self) -> Any:
        return self.value().tolist()

    def untyped_storage(self) -> NoReturn:
        raise UndeferrableError("a storage is asked for")

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise UndeferrableError("numpy would share the memory of a tensor")  # and might write to it

    def __array__(self, dtype: Any = None) -> NoReturn:
        raise UndeferrableError("numpy would share the memory of a tensor")

    def _made_anew(self, memo: dict[int, Any]) -> Deferred:
        """Tensors that share memory have copies that do."""
        if id(self.store) not in memo:
            with torch.no_grad():
                memo[id(self.store)] = Deferred(self.store, _bytes_of(self.meta)).clone()
        base: Deferred = memo[id(self.store)]
        storage: Any = base.meta.untyped_storage()
        meta = torch.empty(0, dtype=self.dtype, device="meta")
        meta.set_(storage, self.storage_offset(), self.shape, self.stride())
        return Deferred(base.store, meta, self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UndeferrableError("a tensor is pickled")


def _bytes_of(meta: Tensor) -> Tensor:
    """The whole memory in which ``meta`` lies."""
    storage: Any = meta.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="meta").set_(storage, 0, (storage.nbytes(),), (1,))


def holding(value: Tensor) -> Deferred:
    """A deferred tensor with the values of the real ``value``, of which a large one is kept as it is."""
    meta = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
    memory = Allocation(meta.untyped_storage().nbytes(), value.device)
    made = Deferred(Store(History(memory)), meta)
    with torch.no_grad():
        made.copy_(value)
    return made


def fake_of(x: Tensor, mode: Any, device: torch.device | None = None) -> Tensor:
    """A tensor of the `FakeTensorMode` ``mode`` in the place of ``x``, on ``device`` if one is given."""
    with mode:
        fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=device or x.device)
    return fake.requires_grad_(x.requires_grad)


def is_deferred(x: Any) -> bool:
    """Whether the values of ``x`` are still to be computed."""
    return isinstance(x, Deferred)
