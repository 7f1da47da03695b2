"""Hooks of the user's on gradients of weights, which meet whole ones where ranks have shares."""

from __future__ import annotations

from torch import nn

from lightning_par.private.leaf_hooks import hooks_of


def hooked(module: nn.Module) -> dict[str, int]:
    """How many the parameters of ``module`` have, by their first names, but for those that have none."""
    return {name: len(hooks) for name, p in module.named_parameters() if (hooks := hooks_of(p)[0])}
