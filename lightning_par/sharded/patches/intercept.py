"""The one place that changes how torch behaves while sharded tensors are about.

Three things would otherwise pass a sharded tensor by: `torch.autograd.Function.apply`, which asks no
``__torch_function__`` and would lose the gradient; the counter of sharded random draws, which activation
checkpointing must wind back when it runs a region again; and the nested-tensor path of `nn.TransformerEncoder`, which
torch takes only where the weights are plain. Nothing changes for plain tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.private.functions import mask_is_left_aligned
from lightning_par.private.graph import node_of
from lightning_par.private.metrics import has_states
from lightning_par.private.module_hooks import marks_module_ends
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.tensors import replace_data_setter, write_count
from lightning_par.private.tensors import set_data as plain_set_data
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded import aliases, backward_reach, gradient_shares
from lightning_par.sharded.patches import module_hooks, transforms
from lightning_par.sharded.rules.alias import kept
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.rules.gathered import GatheredCall
from lightning_par.sharded.rules.lookup import announce_gather
from lightning_par.sharded.rules.sample_trial import run_by_sample
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, axes_of, full

_installed = False
_LINEAR = ("torch.", "lightning_par.")
"""Where autograd functions come from to whose backward shares of a gradient are as good as the whole."""


def install() -> None:
    """Install the interceptions, once per process."""
    global _installed
    if not _installed:
        _installed = True
        _intercept_functions()
        _intercept_checkpoint()
        transforms.install()
        replace_data_setter(_take_data)
        module_hooks.install()


def _intercept_functions() -> None:
    bare_apply = torch.autograd.Function.__dict__["apply"].__func__

    def plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = bare_apply(cls, *args, **kwargs)
        views = [x for x in (result if isinstance(result, tuple) else (result,)) if _loses_gradient(x)]
        if not views:
            return result
        announce_gather(cls, views)
        return tree_map(lambda x: bare_apply(_Whole, x) if _loses_gradient(x) else x, result)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from lightning_par.pipeline.run.located import Run

        if cls is torch.utils.checkpoint.CheckpointFunction:
            _refuse_reentrant(Run.current is not None)
        if Run.current is not None and not Run.current.depth:  # no torch function, but an event of the step
            return Run.current.__torch_function__(cls.apply, (), args, kwargs)
        if aliases.is_any():
            return kept(lambda _, *given: _applied(plain_apply, cls, *given), cls.apply, args, kwargs)
        return _applied(plain_apply, cls, args, kwargs)

    torch.autograd.Function.apply = classmethod(functools.wraps(plain_apply)(apply))  # type: ignore[assignment]


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
    if marks_module_ends(cls):
        return module_hooks.on_parts(functools.partial(apply, cls), args)
    views = [x for x in tree_leaves(args) if isinstance(x, ShardedTensor)]
    if views and views[0].axis.by_sample:
        result = run_by_sample(cls.apply, args, kwargs)
        if result is not NotImplemented:
            return result
    call, wholes = GatheredCall(cls.apply, args, kwargs, views), {}
    if views:
        announce_gather(cls, views)
        wholes = {id(x): full(x) for x in views}
        args = tree_map(lambda x: wholes.get(id(x), x), args)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        args = (_replaying(args[0]), *args[1:])
    if cls.__module__.startswith(_LINEAR):
        result = apply(cls, *args, **kwargs)
    else:
        axes = gradient_shares.active() if torch.is_grad_enabled() and not in_functorch() else ()
        result = _watched(apply, cls, args, kwargs, axes) if axes or views else apply(cls, *args, **kwargs)
    return call.cut(result, wholes) if views else result


def _take_data(x: Tensor, value: Any, set_data: Callable[[Tensor, Tensor], None]) -> bool:
    """``x.data = value`` of a plain ``x`` and a sharded value, whose memory it has from now on, or one that is spread
    over a pipeline."""
    lend = getattr(value, "lend_data", None)
    if lend is not None and not hasattr(x, "lend_data"):
        return bool(lend(x))
    if not isinstance(value, ShardedTensor) or isinstance(x, ShardedTensor):
        return False
    announce_gather(plain_set_data, [value])
    whole = full(value).detach()
    set_data(x, whole)
    if value.axis.size > 1 and whole is not value._innermost:
        aliases.note("data", value.twin(), whole, aliases.gathered, _put, axes_of(value), apart=True, loose=True)
    return True


def _put(x: ShardedTensor, whole: Tensor) -> None:
    x._local.copy_(x.part_of(whole))


def _refuse_reentrant(staged: bool) -> None:
    """Its backward runs a backward of its own, whose gradients neither stages nor shares of them can hand on."""
    if staged or any(axis.residual is not None for axis in gradient_shares.active()):
        where = "where layers lie on several ranks" if staged else "under shard_residual=True"
        raise ValueError(
            f"Reentrant checkpointing at {user_line()} loses gradients {where}. Write "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )


def _watched(apply: Any, cls: Any, args: tuple[Any, ...], kwargs: Any, axes: tuple[Axis, ...]) -> Any:
    """A user's function, which may do to gradients what can't be done to shares of them, as clamping."""
    given = tuple(backward_reach.begins_whole(x, axes) for x in args) if axes else args
    tensors = [x for x in given if isinstance(x, Tensor)]
    versions = [write_count(x) for x in tensors]
    result = apply(cls, *given, **kwargs)
    if [write_count(x) for x in tensors] != versions:
        raise RuntimeError(
            f"The autograd function {cls.__name__!r} at {user_line()} writes into its argument, which it can't where "
            "that is a copy. Let it return a new tensor, as `x.clone()`."
        )
    if not axes:
        return result
    if isinstance(result, tuple):
        return tuple(backward_reach.ends_whole(x, axes) for x in result)
    return backward_reach.ends_whole(result, axes)


def _intercept_checkpoint() -> None:
    # The generator function behind non-reentrant checkpointing; its first argument is what is run, and run again.
    plain = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    named = [p for p in inspect.signature(plain).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(plain)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from lightning_par.pipeline.run.located import Run

        def around(fn: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
            return plain(_replaying(fn), *args[: len(named) - 1], *rest, **kwargs)

        if Run.current is not None:
            Run.current.recomputes = True
        whole = around(fn, *args[len(named) - 1 :], **kwargs)
        return whole if Run.current is None or Run.current.depth else _by_run(Run.current, whole, around)

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = generator


def _by_run(run: Any, whole: Any, around: Callable[..., Any]) -> Any:
    """The region between the steps of the generator ``whole``, run again as one, or each call in it by itself."""

    def by_itself(call: Callable[[], Any]) -> Any:
        steps = around(call)
        next(steps)
        result = call()
        next(steps, None)
        return result

    with run.region(by_itself) as as_one:
        if as_one:
            yield from whole
        else:
            yield


def _replaying(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, about to run, which draws the same sharded random numbers when it is run again.

    Torch runs the non-reentrant kind's forward on ``fn`` itself: what is returned may run first in backward.
    """
    streams = RunState.current.streams
    first = dataclasses.replace(streams)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if streams == first:
            return fn(*args, **kwargs)
        after = dataclasses.replace(streams)
        vars(streams).update(vars(first))
        try:
            return fn(*args, **kwargs)
        finally:
            vars(streams).update(vars(after))

    return run


def whole_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, handed whole tensors; for code that keeps what it is given, such as a metric's update."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: full(x) if isinstance(x, Tensor) else x, (args, kwargs))
        return function(*args, **kwargs)

    return call


def hand_metrics_whole_tensors(module: nn.Module) -> None:
    """Every torchmetrics Metric of ``module`` gets whole tensors, so that its state is plain."""
    for metric in module.modules():
        update = metric.__dict__.get("update")  # torchmetrics wraps it on the instance
        if update is not None and has_states(metric) and not hasattr(update, "_whole"):
            metric.update = whole_arguments(update)  # type: ignore[assignment]
            metric.update._whole = True  # type: ignore[union-attr]


def pad_as_nested(module: nn.Module) -> list[Any]:
    """`nn.TransformerEncoder` in evaluation leaves zeros where the sequence is padded, if all tensors are plain.

    Returns:
        Handles of the hooks that do so where some are sharded; in a copy of the module, too, whose weights are fake.
    """
    encoders = [m for m in module.modules() if isinstance(m, nn.TransformerEncoder)]
    split = [any(isinstance(w, ShardedTensor) for w in m.layers[0].parameters()) for m in encoders]
    return [
        m.register_forward_hook(functools.partial(_zero_padding, one), with_kwargs=True)
        for m, one in zip(encoders, split, strict=True)
    ]


def _zero_padding(
    split: bool, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    given = {**dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)), **kwargs}
    src, padding = given["src"], given.get("src_key_padding_mask")
    first = encoder.layers[0]
    weights = list(first.parameters())
    if padding is None:
        return None
    nested = (
        (split or any(isinstance(x, ShardedTensor) for x in (src, *weights)))
        and getattr(encoder, "use_nested_tensor", False)
        and torch.backends.mha.get_fastpath_enabled()
        and given.get("mask") is None
        and not first.training
        and src.dim() == 3
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (src, *weights)))
        and not torch.is_autocast_enabled()
    )
    if not nested:
        return None
    padded = padding if padding.dtype == torch.bool else padding != 0
    if getattr(encoder, "mask_check", True) and not mask_is_left_aligned(src, ~padded):
        return None
    nothing = output.new_zeros(1, 1, output.shape[-1])
    return torch.where(padded.unsqueeze(-1), nothing if encoder.norm is None else encoder.norm(nothing), output)
