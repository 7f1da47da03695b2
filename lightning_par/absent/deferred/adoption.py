"""Real tensors that lie in mapped files become deferred ones: their values are still to be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.absent.deferred.history import Allocation, History, Store
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.mappings import Mappings
from lightning_par.absent.mapped.region import Region
from lightning_par.private.pytree import tree_map
from lightning_par.sharded.identity import become, swappable
from lightning_par.sharded.overlapping_parameters import overlapping


class Adoption:
    """What was mapped while a module was loaded; tensors that share memory there share it here.

    Example::

        adoption = Adoption()
        weights = safetensors.torch.load_file("model.safetensors")
        deferred = adoption.deferred(weights["weight"])
    """

    def __init__(self) -> None:
        self.mappings = Mappings()
        self._memories: dict[Region, tuple[Store, torch.UntypedStorage]] = {}

    def deferred(self, x: Tensor) -> Deferred | None:
        """A deferred tensor of the values of ``x``; None where they are not those of a mapped file."""
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
        region = self.mappings.region(x) if plain and not x.is_conj() and not x.is_neg() else None
        if region is None:
            return None
        if region not in self._memories:
            twin = torch.empty(region.nbytes, dtype=torch.uint8, device="meta")
            store = Store(History(Allocation(region.nbytes, x.device, region)))
            self._memories[region] = store, twin.untyped_storage()
        store, memory = self._memories[region]
        lies = Geometry.of(x)
        meta = torch.empty(0, dtype=x.dtype, device="meta")
        meta.set_(memory, lies.offset, lies.shape, lies.stride)  # type: ignore[arg-type]
        return Deferred(store, meta)

    def instead(self, value: Any) -> Any:
        """``value`` with deferred tensors in place of those in mapped files."""

        def replaced(x: Any) -> Any:
            found = self.deferred(x) if isinstance(x, Tensor) else None
            return x if found is None else found

        return tree_map(replaced, value)

    def of_module(self, module: nn.Module) -> None:
        """Defer the parameters and buffers of ``module`` that lie in mapped files, in place.

        Those in whose memory other tensors lie, too, stay as they are.
        """
        shared = overlapping(module)
        with swappable(module.modules()):
            for name, x in [*module.named_parameters(), *module.named_buffers()]:
                found = None if name in shared else self.deferred(x)
                if found is None:
                    continue
                new: Tensor = found
                if isinstance(x, nn.Parameter):
                    new = nn.Parameter(found, requires_grad=x.requires_grad)
                grad = x.grad
                become(x, new, name)
                if grad is not None:
                    x.grad = grad
