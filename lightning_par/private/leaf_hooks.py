"""Hooks on the gradient of a leaf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_par.private.module_hooks import users_of


def hooks_of(leaf: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The user's hooks of a leaf: those that see its gradient, those that run once it is in ``.grad``.

    The dicts are the leaf's own, from which the handles that the user was given remove them.
    """
    before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return {} if before is None else before, {} if after is None else after


def hooked(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those of some leaves that may have hooks, of whomever; most have none."""
    return [(name, x) for name, x in named if x._backward_hooks or x._post_accumulate_grad_hooks]


def set_hooks(leaf: Tensor, hooks: tuple[dict[int, Any], dict[int, Any]]) -> None:
    """Let ``leaf`` run the hooks in these dicts: ``swap_tensors`` leaves them with the object, which no longer asks."""
    leaf._backward_hooks, leaf._post_accumulate_grad_hooks = (each or None for each in hooks)  # type: ignore[assignment]


def take_hooks(leaf: Tensor) -> list[tuple[Any, Any]]:
    """Take the user's hooks off a leaf, for a while; torch can only remove a hook by the handle it gave away."""
    taken = []
    for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
        if hooks:
            taken.append((hooks, hooks.copy()))
            hooks.clear()
    return taken


def put_hooks(taken: list[tuple[Any, Any]]) -> None:
    """Put back what `take_hooks` took."""
    for hooks, content in taken:
        hooks.update(content)


def number_of_leaf_hooks(leaf: Tensor) -> int:
    """How many hooks of the user's see the gradient of ``leaf``."""
    before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return len(users_of(before)) + len(users_of(after)) if before or after else 0
