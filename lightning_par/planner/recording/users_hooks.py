"""Hooks of the user's on gradients of weights, which meet whole ones where ranks have shares."""

from __future__ import annotations

from torch import nn

from lightning_par.private.leaf_hooks import hooks_of


def hooked(module: nn.Module) -> frozenset[str]:
    """The first names of the parameters of ``module`` that have any."""
    return frozenset(name for name, p in module.named_parameters() if hooks_of(p)[0])
