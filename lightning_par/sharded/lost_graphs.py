"""Tensors whose graph another rank has, or a run had to let go of: a gradient for one ends the job."""

from __future__ import annotations

from functools import partial

from torch import Tensor


def refuse_gradient(x: Tensor, why: str) -> Tensor:
    """``x``, which required a gradient where it was computed, as a leaf of which a gradient raises RuntimeError.

    Example::

        x = refuse_gradient(torch.ones(1), "It was computed elsewhere.")
        assert has_no_graph(x)
        x.backward()  # RuntimeError: It was computed elsewhere.
    """
    x.requires_grad_().register_hook(partial(_lost, why))
    x._has_no_graph = True  # type: ignore[attr-defined]
    return x


def has_no_graph(x: Tensor) -> bool:
    """Whether `refuse_gradient` was called of ``x``."""
    return hasattr(x, "_has_no_graph")


def _lost(why: str, gradient: Tensor) -> None:
    raise RuntimeError(why)
