"""A hook of a tensor meets its whole gradient where ranks have shares of it, and ``retain_grad`` keeps that."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from lightning_par.sharded import backward_reach
from lightning_par.sharded.gradient_shares import active
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState


def patches() -> tuple[Replacement, ...]:
    """Of `torch.Tensor.register_hook` and `torch.Tensor.retain_grad`."""
    of = functools.partial(Replacement, Tensor)
    return of("register_hook", _whole_in_hook), of("retain_grad", _found_again)


def _whole_in_hook(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def register_hook(self: Tensor, hook: Any) -> Any:
        stored = getattr(self, "_stored_weight", None)
        if stored is not None and use.on:  # it is whole for a call alone; the hook stays with what is stored
            return stored.register_hook(hook)
        state = RunState.current
        axes = backward_reach.sharing(self, active() or state.shared_between_steps) if use.on else ()
        if not axes or self.is_leaf:  # a leaf's are seen to when a backward reaches it
            return plain(self, hook)
        known = bool(active())  # else the backward may be one in which ranks do not meet

        @functools.wraps(hook)
        def on_whole(grad: Tensor) -> Any:
            over = axes if known else backward_reach.sharing(self, state.shared_backward)
            result = hook(backward_reach.leave(grad, over))
            # what the user returns is whole
            return result / backward_reach.ranks(over) if isinstance(result, Tensor) else result

        return plain(self, on_whole)

    return register_hook


def _found_again(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def retain_grad(self: Tensor) -> None:
        plain(self)
        state = RunState.current
        if use.on and (state.shared or state.shared_between_steps) and not self.is_leaf:
            backward_reach.retain(self)

    return retain_grad
