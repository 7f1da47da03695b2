"""Weights that stay whole on every replica though ``data_parallel="fsdp"`` stores weights in parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from torch import nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.leaf_hooks import hooks_of
from lightning_par.sharded.overlapping_parameters import overlapping
from lightning_par.sharded.packed_parameters import packed_parameters
from lightning_par.sharded.tensor import leaf
from lightning_par.sharded.user_classes import with_own_ways

_NAMED = 3


def kept_whole(module: nn.Module, callbacks: Iterable[Any], trains: bool = True) -> dict[str, str]:
    """The parameters that aren't stored in parts, by their first names, and why.

    Args:
        module: whose parameters.
        callbacks: what may hold views of them beside ``module``.
        trains: whether they get gradients. A user's hook that hangs on one before the run is handed what its own
            replica's backward gives it, as under DDP; of parts there is no such gradient but the mean over replicas.

    Example::

        layer = nn.Linear(2, 2)
        layer.bias.register_hook(lambda grad: grad.clamp(-1, 1))
        assert kept_whole(layer, ()) == {"bias": "has hooks, which meet a replica's own gradient"}
    """
    packed = with_own_ways(module) | packed_parameters(module)
    shared = overlapping(module, callbacks)
    found = {name: f"shares memory with {other}" for name, other in shared.items()}
    found |= {name: f"is {what}" for name, what in packed.items()}
    if trains:
        own = ((name, p) for name, p in module.named_parameters() if not is_elsewhere(p))
        hooked = [name for name, p in own if any(hooks_of(leaf(p)))]
        found |= dict.fromkeys(hooked, "has hooks, which meet a replica's own gradient")
    return found


def told(whole: dict[str, str]) -> str:
    """What the start-up table says of the parameters ``whole``: a sentence a reason.

    Example::

        assert told({"a": "is packed", "b": "is packed"}) == "a, b stay whole: each is packed."
    """
    lines = []
    for why, group in groupby(sorted(whole, key=lambda name: whole[name]), key=lambda name: whole[name]):
        names = [*group]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        stay, each = ("stay", "each") if len(names) > 1 else ("stays", "it")
        lines.append(f"{', '.join(names[:_NAMED])}{more} {stay} whole: {each} {why}.")
    return " ".join(lines)
