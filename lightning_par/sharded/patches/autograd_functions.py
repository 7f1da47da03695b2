"""`torch.autograd.Function.apply` asks no ``__torch_function__``, and would lose the gradient of a sharded tensor.

It is handed whole tensors, but where it runs sample by sample. Nothing changes for plain tensors.
"""

from __future__ import annotations

import functools
import inspect
from itertools import repeat
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.private.graph import KEEPS_ARGUMENTS, node_of
from lightning_par.private.module_hooks import marks_module_ends
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.transforms import in_functorch
from lightning_par.python_state.tensor_writes import version_of
from lightning_par.sharded import aliases, backward_reach, gradient_shares
from lightning_par.sharded.lent_weights import LentWeights
from lightning_par.sharded.patches.checkpointing import replaying
from lightning_par.sharded.patches.function_code import FunctionCode
from lightning_par.sharded.patches.module_hooks import on_parts
from lightning_par.sharded.patches.replacement import Use
from lightning_par.sharded.rules.alias import kept
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.rules.gathered import GatheredCall
from lightning_par.sharded.rules.lookup import announce_gather
from lightning_par.sharded.rules.sample_trial import run_by_sample
from lightning_par.sharded.rules.stored_weights import whole
from lightning_par.sharded.tensor import ShardedTensor, full
from lightning_par.trial.memo import Memo

_LINEAR = ("torch.", "lightning_par.")
"""Where autograd functions come from to whose backward shares of a gradient are as good as the whole."""


_LOOKED_INTO = (ShardedTensor, tuple, list, dict)
_ours: Memo[type, bool] = Memo(lambda cls: cls.__module__.startswith("lightning_par."))


def patch() -> FunctionCode:
    """Of `torch.autograd.Function.apply`, which code has by names of its own, too: ``twice = Twice.apply``."""
    return FunctionCode(inspect.getattr_static(torch.autograd.Function, "apply").__func__, _on_sharded)


def _on_sharded(bare_apply: Any, use: Use) -> Any:
    def plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = bare_apply(cls, *args, **kwargs)
        views = [x for x in (result if isinstance(result, tuple) else (result,)) if _loses_gradient(x)]
        if not views:
            return result
        announce_gather(cls, views)
        return tree_map(lambda x: bare_apply(_Whole, x) if _loses_gradient(x) else x, result)

    @functools.wraps(plain_apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from lightning_par.pipeline.run.located import Run

        if not use.on or cls is KEEPS_ARGUMENTS:
            return bare_apply(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            _refuse_reentrant(Run.current is not None)
        if Run.current is not None and not Run.current.depth:  # no torch function, but an event of the step
            return Run.current.__torch_function__(cls.apply, (), args, kwargs)
        if aliases.is_any():
            return kept(lambda _, *given: _applied(plain_apply, cls, *given), cls.apply, args, kwargs)
        return _applied(plain_apply, cls, args, kwargs)

    return apply


def _loses_gradient(x: Any) -> bool:
    """Whether ``x`` came sharded out of a function's forward, as of a region that runs again in backward.

    Autograd then knows the tensor that stands for all parts; what is computed with this rank's part is lost to it.
    """
    return type(x) is ShardedTensor and x.grad_fn is None and node_of(x) is not None


class _Whole(torch.autograd.Function):
    """From the tensor that stands for all parts on to a plain one, whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return full(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _applied(apply: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cls.apply(*args)``, of which no torch function tells."""
    if _ours[cls] and not any(map(isinstance, args, repeat(_LOOKED_INTO))):
        return apply(cls, *args, **kwargs)  # it does to gradients what is right, and has nothing to be made whole
    if marks_module_ends(cls):
        return on_parts(functools.partial(apply, cls), args)
    if (lent := LentWeights.to(args)) is not None:
        return _applied(functools.partial(lent.apply, apply), cls, lent.handed(args), kwargs)
    views = [x for x in tree_leaves(args) if isinstance(x, ShardedTensor)]
    if any(x.axis.by_sample for x in views):
        args = _with_whole_weights(cls, args, views)
        result = run_by_sample(cls.apply, args, kwargs)
        if result is not NotImplemented:
            return result
    call, wholes = GatheredCall(cls.apply, args, kwargs, views), {}
    if views:
        announce_gather(cls, views)
        wholes = {id(x): whole(x) for x in views}
        args = tree_map(lambda x: wholes.get(id(x), x), args)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        args = (replaying(args[0]), *args[1:])
    if cls.__module__.startswith(_LINEAR):
        result = apply(cls, *args, **kwargs)
    else:
        axes = gradient_shares.active() if torch.is_grad_enabled() and not in_functorch() else ()
        if axes:
            _refuse_layers(cls, args)
        result = _watched(apply, cls, args, kwargs, axes) if axes or views else apply(cls, *args, **kwargs)
    return call.cut(result, wholes) if views else result


def _with_whole_weights(cls: Any, args: tuple[Any, ...], views: list[ShardedTensor]) -> tuple[Any, ...]:
    """``args`` of a microbatch, in which ranks have parts of ``views``: those of its samples stay."""
    parts = [x for x in views if not x.axis.by_sample]
    if not parts:
        return args
    announce_gather(cls, parts)
    wholes = {id(x): whole(x) for x in parts}
    views[:] = [x for x in views if x.axis.by_sample]
    return tree_map(lambda x: wholes.get(id(x), x), args)  # type: ignore[no-any-return]


def _refuse_reentrant(staged: bool) -> None:
    """Its backward runs a backward of its own, whose gradients neither stages nor shares of them can hand on."""
    if staged or any(axis.residual is not None for axis in gradient_shares.active()):
        where = "where layers lie on several ranks" if staged else "under shard_residual=True"
        raise ValueError(
            f"Reentrant checkpointing at {user_line()} loses gradients {where}. Write "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )


def _refuse_layers(cls: Any, args: tuple[Any, ...]) -> None:
    """Raises NotImplementedError where a user's function is given layers, as those of reversible networks are: its
    backward, which gets whole gradients, may add whole ones to their weights, where each rank's are a share."""
    layers = [x for x in tree_leaves(args) if isinstance(x, nn.Module) and any(p.requires_grad for p in x.parameters())]
    if layers:
        raise NotImplementedError(
            f"{user_line()}: {cls.__name__} is given a {type(layers[0]).__name__}, to whose weights its backward may "
            "add gradients by itself. Where ranks hold shares of gradients, as along a sequence axis, each would add "
            "the whole. Call the layers as they are, with torch.utils.checkpoint.checkpoint to spare memory, or use a "
            "layout without a sequence axis and without shard_residual."
        )


def _watched(apply: Any, cls: Any, args: tuple[Any, ...], kwargs: Any, axes: tuple[Axis, ...]) -> Any:
    """A user's function, which may do to gradients what can't be done to shares of them, as clamping."""
    # in backward it gets whole gradients by `ends_whole`, and gives shares by this
    given = tuple(backward_reach.begins_whole(x, axes) for x in args) if axes else args
    tensors = [x for x in given if isinstance(x, Tensor)]
    versions = [version_of(x) for x in tensors]
    result = apply(cls, *given, **kwargs)
    if [version_of(x) for x in tensors] != versions:
        raise RuntimeError(
            f"The autograd function {cls.__name__!r} at {user_line()} writes into its argument, which it can't where "
            "that is a copy. Let it return a new tensor, as `x.clone()`."
        )
    if not axes:
        return result
    if isinstance(result, tuple):
        return tuple(backward_reach.ends_whole(x, axes) for x in result)
    return backward_reach.ends_whole(result, axes)
