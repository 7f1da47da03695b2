"""Buffers that a rank lacks, lent for the time of a trial run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.broadcast import kind_of, send_to_all


def lacking_buffers(module: nn.Module, axis: Axis) -> dict[int, Tensor]:
    """The buffers that other ranks hold, by the id of what stands for them here. All ranks must call it."""
    here = dict(module.named_buffers())
    held = {name: kind_of(x) for name, x in here.items() if type(x) is Tensor and _is_there(x)}
    lacking = [name for name, x in here.items() if is_elsewhere(x)]
    told = axis.all_gather_object((held, lacking), "buffers")
    found: dict[int, Tensor] = {}
    for name in dict.fromkeys(name for _, theirs in told for name in theirs):
        source = next((rank for rank, (theirs, _) in enumerate(told) if name in theirs), None)
        if source is not None:  # else in parts
            value = send_to_all(here.get(name), told[source][0][name], source, axis, "buffers")
            if name in lacking:
                found[id(here[name])] = value.to(here[name].device)
    return found


def _is_there(x: Tensor) -> bool:
    return not x.is_meta and x.layout is torch.strided
