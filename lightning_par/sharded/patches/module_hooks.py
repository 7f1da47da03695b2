"""Full backward hooks of modules, where activations are parts and gradients of whole tensors are shares.

Torch hands a hook what backward brings to the module's inputs and outputs. Here it sees them as the user's code sees
the tensors themselves: a sharded tensor's gradient is sharded, a plain one's is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_par.private.module_hooks import BackwardHook, backward_hook, has_partial_hooks
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sharded import backward_reach, gradient_shares
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.tensor import ShardedTensor


def patch() -> Replacement:
    """Of what modules make of their backward hooks. Nothing changes for plain tensors elsewhere."""
    return Replacement(*backward_hook(), lambda plain, use: type("BackwardHook", (_Hook, plain), {"_use": use}))


def refuse_partial_hooks(module: nn.Module) -> None:
    """Raises ValueError for the deprecated kind of hook, which sees what an operation within the module sees."""
    for name, child in module.named_modules():
        if has_partial_hooks(child):
            raise ValueError(
                f"{name or 'The LightningModule'!r} has a hook of `register_backward_hook`, which would see a part of "
                "the gradients: register it by `register_full_backward_hook`."
            )


def on_parts(apply: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Torch's function that marks where a module begins or ends, on the parts of sharded tensors."""
    ends = [gradient_shares.end(x) for x in args]
    return tuple(_like(x, made) for x, made in zip(args, apply(*ends), strict=True))


def _like(given: Any, made: Any) -> Any:
    if isinstance(given, BatchTensor):
        return BatchTensor(made, given.sharded_dim, given.positions, given.axis)
    if not isinstance(given, ShardedTensor):
        return made
    return given.with_local(_like(given._local, made))  # it may be sharded over two axes


@dataclass(frozen=True)
class _Seen:
    """How gradients of some tensors look to the user, and back."""

    tensors: tuple[Any, ...]

    @classmethod
    def of(cls, args: Any) -> _Seen:
        return cls(tuple(_like(x, gradient_shares.end(x).detach()) if _is_part(x) else None for x in _listed(args)))

    def shown(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        axes = gradient_shares.active()
        return tuple(
            g if g is None else backward_reach.leave(g, axes) if like is None else _like(like, g)
            for g, like in zip(gradients, self.tensors, strict=True)
        )

    def hidden(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        ranks = backward_reach.ranks(gradient_shares.active())
        return tuple(
            g
            if g is None
            else g / ranks
            if like is None
            else gradient_shares.end(like.part_of(g))  # each rank goes on with its share
            for g, like in zip(gradients, self.tensors, strict=True)
        )


class _Hook(BackwardHook):  # type: ignore[misc]
    """Torch's, whose user hooks are given what the user knows."""

    _use: ClassVar[Use]

    def __init__(self, module: nn.Module, user_hooks: Any, user_pre_hooks: Any) -> None:
        self._inputs = self._outputs = _Seen(())
        if self._use.on:
            user_hooks = [self._after(hook) for hook in user_hooks]
            user_pre_hooks = [self._before(hook) for hook in user_pre_hooks]
        super().__init__(module, user_hooks, user_pre_hooks)

    def setup_input_hook(self, args: Any) -> Any:
        self._inputs = _Seen.of(args)
        return super().setup_input_hook(args)

    def setup_output_hook(self, args: Any) -> Any:
        self._outputs = _Seen.of(args)
        return super().setup_output_hook(args)

    def _after(self, hook: Any) -> Any:
        def call(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            result = hook(module, self._inputs.shown(inputs), self._outputs.shown(outputs))
            return None if result is None else self._inputs.hidden(_listed(result))

        return call

    def _before(self, hook: Any) -> Any:
        def call(module: nn.Module, outputs: Any) -> Any:
            result = hook(module, self._outputs.shown(outputs))
            return None if result is None else self._outputs.hidden(_listed(result))

        return call


def _is_part(x: Any) -> bool:
    return isinstance(x, ShardedTensor) and not isinstance(x, BatchTensor)


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
