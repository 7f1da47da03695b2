"""A block's weights, as they are stored, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_par.absent.deferred.deferred_tensor import is_deferred
from lightning_par.fsdp.flat import Flat, Mixed, Place
from lightning_par.fsdp.served import Precisions
from lightning_par.fsdp.stored_parameter import StorageAxis, Stored
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modules import parameters_of

Slot = tuple[dict[str, Any], str, int]  # the parameters of a module, a name there, which weight it is


class StoredBlock:
    """The weights of one block.

    Args:
        modules: whose calls use them; of several the weights stay whole until backward has ended.
        weights: in the order of their messages; of one precision, on one device.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[Stored]) -> None:
        self.modules, self.weights = modules, list(weights)
        self.axis: StorageAxis = weights[0]._peers
        self.dtype = weights[0]._local.dtype
        self.kind = weights[0].device.type
        self.numbers = {id(x): i for i, x in enumerate(weights)}
        self.flat = flat_of(weights)
        self.precisions = Precisions([x._local.dtype for x in weights])
        self._own = self._mixed()
        self._under_autocast = self._own
        self._flats: dict[tuple[bool, ...], Flat] = {}

    @property
    def stays(self) -> bool:
        return len(self.modules) > 1

    def slots(self, module: nn.Module) -> list[Slot]:
        """Where ``module`` and those in it hold the weights."""
        found: list[Slot] = []
        for m in module.modules():
            held: dict[str, Any] = parameters_of(m)  # type: ignore[assignment]
            found += [(held, name, self.numbers[id(x)]) for name, x in held.items() if id(x) in self.numbers]
        return found

    def flat_of(self, trains: list[bool]) -> Flat:
        """Of those weights alone that have gradients."""
        if all(trains):
            return self.flat
        key = tuple(trains)
        if key not in self._flats:
            self._flats[key] = Flat([p for p, t in zip(self.flat.places, trains) if t], self.axis.size)
        return self._flats[key]

    @property
    def parcels(self) -> Mixed:
        """How the weights travel for a call that begins now."""
        return self._under_autocast if torch.is_autocast_enabled(self.kind) else self._own

    def decide(self) -> None:
        """Under autocast weights travel from now on as they were asked for."""
        if self.precisions.decide():
            self._under_autocast = self._mixed()

    def _mixed(self) -> Mixed:
        return Mixed(self.flat.places, self.precisions.travel, self.axis.size)


def fits(x: Any) -> bool:
    """Whether ``x`` can be gathered beside others."""
    if not isinstance(x, Stored) or not x._local.is_floating_point():
        return False
    # A deferred one is plain before a step, and fakes stand for plain ones in dry runs alone.
    plain = type(x._local) in (nn.Parameter, FakeTensor) or is_deferred(x._local)
    return plain and _placed(x) is not None


def entries_in_message(x: Stored) -> int:
    """Of a rank's part of ``x``, which `fits`, in a message: alike on all ranks, though some store fewer. What travels
    together goes by these."""
    place = _placed(x)
    assert place is not None
    return place.part


def _placed(x: Stored) -> Place | None:
    shape = list(x._local.shape)
    shape[x._dim] = x._inner.size
    return Place.of(shape, x._dim, x._inner, x._peers.size, x._peers.rank)


def flat_of(weights: Sequence[Stored]) -> Flat:
    """The message of ``weights``, all of which `fits`."""
    places = [place for x in weights if (place := _placed(x)) is not None]
    return Flat(places, weights[0]._peers.size)
