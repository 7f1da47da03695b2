"""The user's hooks on the gradient of a parameter of which a rank holds a part.

They hang on the parameter, as on one device: there the handles find them which the user was given, and other code that
asks who has hooks. Its part, which alone gets a gradient, runs them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_par.private.leaf_hooks import hooks_of, set_hooks
from lightning_par.private.modes import DisableTorchFunction

if TYPE_CHECKING:
    from lightning_par.sharded.tensor import ShardedTensor


def register(parameter: ShardedTensor, hook: Callable[[Tensor], Any], after: bool = False) -> RemovableHandle:
    """Hang ``hook`` on ``parameter``.

    Args:
        parameter: whose part is a leaf that requires a gradient.
        hook: meets a gradient that is sharded as the parameter is, or, ``after`` it has come to ``.grad``, the
            parameter.
        after: as by `torch.Tensor.register_post_accumulate_grad_hook`.
    """
    with DisableTorchFunction():
        dicts = hooks_of(parameter)
        hooks = dicts[after] or OrderedDict()
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        set_hooks(parameter, (dicts[0], hooks) if after else (hooks, dicts[1]))
    hang(parameter)
    return handle


def hang(parameter: Tensor) -> None:
    """Let the hooks on ``parameter``, which has become another tensor, run on: those of a frozen one, too, may thaw."""
    dicts = _hooks_of(parameter)
    if not any(dicts):
        return
    part = getattr(parameter, "_local", None)
    if part is None:
        set_hooks(parameter, dicts)
        return
    for kind, hooks in zip((_Before, _After), dicts, strict=True):
        standing = hooks_of(part)[kind.AFTER].values()
        if not hooks or any(type(x) is kind and x.parameter is parameter for x in standing):
            continue
        trained = part.requires_grad
        part.requires_grad_(True)
        run = kind(parameter)  # type: ignore[arg-type]
        part.register_post_accumulate_grad_hook(run) if kind.AFTER else part.register_hook(run)
        part.requires_grad_(trained)


def has_come(parameter: ShardedTensor) -> bool:
    """Whether a hook of ``parameter`` runs that meets the gradient which has come to it."""
    return any(type(x) is _After and x.runs for x in hooks_of(parameter.local)[1].values())


def _hooks_of(parameter: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    with DisableTorchFunction():
        return hooks_of(parameter)


class _OfUser:
    """On the part, for the user's hooks of one kind."""

    AFTER = False

    def __init__(self, parameter: ShardedTensor) -> None:
        self.parameter = parameter
        self.runs = False

    @property
    def of_user(self) -> list[Any]:
        """The hooks that are left; see `lightning_par.private.module_hooks.users_of`."""
        return [*_hooks_of(self.parameter)[self.AFTER].values()]

    def __call__(self, x: Tensor) -> Any:
        raise NotImplementedError


class _Before(_OfUser):
    def __call__(self, x: Tensor) -> Any:
        grad = x
        for hook in self.of_user:
            result = hook(self.parameter.with_local(grad))
            if result is not None:
                grad = self.parameter.part_of(result)
        return None if grad is x else grad


class _After(_OfUser):
    AFTER = True

    def __call__(self, x: Tensor) -> Any:
        self.runs = True
        try:
            for hook in self.of_user:
                if hook(self.parameter) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # as torch says
        finally:
            self.runs = False
