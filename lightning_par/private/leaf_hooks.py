"""Hooks on the gradient of a leaf."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from torch import Tensor

from lightning_par.private.module_hooks import users_of

_Name = TypeVar("_Name")
_before, _after = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def hooks_of(leaf: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The user's hooks of a leaf: those that see its gradient, those that run once it is in ``.grad``.

    The dicts are the leaf's own, from which the handles that the user was given remove them.
    """
    before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return {} if before is None else before, {} if after is None else after


def hooked(named: Iterable[tuple[_Name, Tensor]]) -> list[tuple[_Name, Tensor]]:
    """Those of some leaves that may have hooks, of whomever; most have none."""
    named = [*named]
    leaves = [*map(itemgetter(1), named)]
    if not any(map(_before, leaves)) and not any(map(_after, leaves)):  # asked of all weights, several times a step
        return []
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
