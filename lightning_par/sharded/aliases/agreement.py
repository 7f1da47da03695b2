"""What ranks ask each other before they make a copy anew: none of them may do so alone."""

from __future__ import annotations

import torch

from lightning_par.mesh.axis import Axis
from lightning_par.sharded.aliases.frames import Axes


def alike(axis: Axis, value: int, device: torch.device) -> bool:
    """Whether all ranks along ``axis`` say the same."""
    said = torch.tensor([value, -value], device=device)  # the largest and the smallest in one message
    high, low = axis.all_reduce_(said, "aliases", "max").tolist()
    return bool(high == -low)


def anywhere(axes: Axes, said: bool, device: torch.device) -> bool:
    """Whether a rank along one of ``axes`` says so."""
    for axis in axes:
        said = bool(axis.all_reduce_(torch.tensor(int(said), device=device), "aliases", "max"))
    return said
