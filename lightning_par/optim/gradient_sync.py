"""Gradients: averaged over the data axis, and summed over the sequence axis, once per accumulation window."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.axis import Axis
from lightning_par.optim.gradient_buckets import Bucket, Buckets
from lightning_par.optim.gradients_ahead import Ahead
from lightning_par.optim.looked_at_shares import LookedAtShares
from lightning_par.optim.trained_weights import TrainedWeights
from lightning_par.private.leaf_hooks import hooks_of
from lightning_par.private.modules import ModuleTree
from lightning_par.sharded import patches
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, leaf

BUCKET_BYTES = 25 * 2**20  # as DDP: large enough for bandwidth, small enough to start early


class GradientSync:
    """Averages the gradients of ``module`` over the data axis, in buckets that travel while backward still runs.

    While ``blocked`` (all but the last batch of an accumulation window) nothing is sent: gradients then hold the whole
    window, and one average is enough. Buckets leave in the same order on all ranks, whatever the order in which
    gradients arrive; those that never arrive leave as zeros at the end, so that a branch which one rank alone takes
    can't make the others wait. A parameter that got no gradient on any rank keeps what it had.

    Args:
        module: its parameters are looked up anew before each backward; ``requires_grad`` may change on the way.
        axis: the ranks that hold the same weights: along data, and along the sequence, too.
        bucket_bytes: the size at which a bucket is full; None for `BUCKET_BYTES`.
        copies: how many of these ranks have a gradient of their own, to be averaged; None for all. Where there are
            fewer than ranks, each rank along the sequence has a share of one, and the shares are summed.
        split: the ranks among ``axis`` that hold the same part of a split parameter; None for all of ``axis``.
        stored: the ranks among ``axis`` that have a share each of the gradient of a parameter that is stored in parts
            and not split; None where what gathered it has summed all of it.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        bucket_bytes: int | None = None,
        copies: int | None = None,
        split: Axis | None = None,
        stored: Axis | None = None,
    ) -> None:
        self.blocked = False
        self._module, self._tree = module, ModuleTree(module)
        self._axis = axis
        self._split = split or axis
        self._nobody = Axis("data", (0,), 0, None)
        self._stored = stored or self._nobody
        self._copies = axis.size if copies is None else copies
        self._bucket_bytes = bucket_bytes or BUCKET_BYTES
        self._handles: dict[int, Any] = {}
        self._found: list[Tensor] = []  # the leaves of the module's parameters
        self._buckets = Buckets(axis)
        self._touched: set[int] = set()  # ids of leaves that got a gradient since the last average
        self._begun = False  # whether a window has begun whose gradients are not averaged yet
        self._delivers = False  # whether the backward that comes gives what is averaged already
        self._armed = False
        self._divided: list[tuple[Tensor, int]] = []  # which were, as the backward that runs began, and by how much
        self._shared_out = True  # whether what earlier backwards left is shares as what comes
        self._ended = True  # whether the last backward has ended, and in no error
        self._shares = LookedAtShares(axis, self._name_of_share, self._settle)
        self._reached = False  # whether the backward that runs has given a gradient
        self._synced = False  # whether the backward that was announced is through, and averaged
        self._state = RunState.current
        if axis.size > 1:
            _refuse_sparse(module)
            self._find_leaves()
            self._trained = TrainedWeights(self._tree.parameters, axis)
            patches.SHARES.hold(self)
            patches.NODES.hold(self)
            self._state.syncs.append(weakref.ref(self))

    def before_backward(self) -> None:
        """To be called before a backward whose end is announced by `after_backward`."""
        self._synced = False
        if self._axis.size > 1 and not self._delivers:
            self._trained.agree()
            self._arm()

    def begin(self) -> None:
        """Called where a backward begins, announced or not."""
        self._synced = self._reached = self._ended = False
        if self._axis.size > 1 and not self._delivers:
            if not self._armed:
                self._arm()
            self._share_out()
            self.watch_looks()

    def end(self) -> None:
        """Called where a backward has ended, before any hook of Lightning."""
        self._ended = True
        if (self._reached or self._delivers) and not self.blocked:
            self.after_backward()
            self._synced = True

    @torch.no_grad()
    def abandon(self) -> None:
        """Called where a backward has failed: what was whole before it is whole again."""
        for x, count in self._divided:
            if x.grad is not None and id(x) in self._touched:
                x.grad.mul_(count)
                self._touched.discard(id(x))
        self._divided, self._armed = [], False

    def after_backward(self) -> None:
        """Average what the backward left, unless blocked or done. All ranks along the axis must call it."""
        self._begun |= self.blocked and bool(self._touched)
        if self._axis.size == 1 or self.blocked or self._synced or self._delivers:
            self._armed = self._synced = self._delivers = False
            return
        if not self._armed:
            self._arm()
        self._share_out()
        self._average()
        self._armed = False

    def _average(self) -> None:
        _write(self._buckets.send_rest(_grad, lambda x: id(x) in self._touched)())
        self._touched.clear()
        self._divided = []
        self._begun = False
        self._shares.end()

    def watch_looks(self) -> None:
        """User code may look at gradients of which this rank has a share alone."""
        if any(map(_shares_of, self._buckets)):
            self._shares.begin()

    def _settle(self) -> None:
        """User code looks at gradients, outside of backward: those of a window become whole; what comes is added."""
        if self._touched and self._ended:
            self._shares.meet()
            self._buckets.reset()
            self._average()

    def _name_of_share(self, x: Tensor) -> str | None:
        buckets = [bucket for bucket in self._buckets if any(x is leaf for leaf in bucket.leaves)]
        return self._name(x) if any(map(_shares_of, buckets)) else None

    def ahead(self) -> Ahead | None:
        """The average of gradients that are made before a backward is called which only delivers them.

        None where there is nothing to send, or other gradients of the window wait to be sent with them.
        """
        self._delivers = False
        if self._axis.size > 1:
            self._trained.agree()
        if self._axis.size == 1 or self.blocked or self._begun:
            return None
        self._find_leaves()
        for bucket in self._buckets:
            self._refuse_early_steps(bucket)
        self._buckets.reset()
        return Ahead(self._buckets, self._set_delivers, self._name)

    def _set_delivers(self) -> None:
        self._delivers = True

    def close(self) -> None:
        """Take the hooks off the parameters."""
        patches.SHARES.release(self)
        patches.NODES.release(self)
        self._shares.end()
        self._state.syncs = [one for one in self._state.syncs if one() not in (None, self)]
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _arm(self) -> None:
        self._find_leaves()
        self._buckets.reset()
        self._armed, self._shared_out = True, False
        for bucket in self._buckets:
            self._refuse_early_steps(bucket)

    @torch.no_grad()
    def _share_out(self) -> None:
        """What an earlier backward left is whole; where shares are about to be added to it, it becomes one, too.

        Not before backward begins: user code looks at it until then.
        """
        if self._shared_out:
            return
        self._shared_out, self._divided = True, []
        for bucket in self._buckets:
            count = _shares_of(bucket)
            for x in bucket.leaves if count else ():
                if x.grad is not None and id(x) not in self._touched:
                    x.grad.div_(count)
                    self._touched.add(id(x))
                    self._divided.append((x, count))

    def _refuse_early_steps(self, bucket: Bucket) -> None:
        """A hook of the user's own, as optimizers that step within backward have, would see what is not synced yet."""
        for x in bucket.leaves:
            if len(hooks_of(x)[1]) > 1:
                raise runs_too_early(self._name(x))

    def _find_leaves(self) -> None:
        parameters = [p for _, p in self._tree.parameters()]
        found = [*map(leaf, parameters)]
        if self._is_as_it_was(found):
            return
        pairs = zip(found, map(self._along, parameters), strict=True)
        held = {id(x): (x, axis) for x, axis in pairs if axis.size > 1 and not is_elsewhere(x)}
        # a leaf frozen within the window may have got its share, be it on another rank
        frozen = self._handles if self._begun else ()
        along = {i: axis for i, (x, axis) in held.items() if x.requires_grad or i in frozen}
        leaves = {i: held[i][0] for i in along}
        if leaves.keys() == self._handles.keys():
            return
        for i in self._handles.keys() - leaves.keys():
            self._handles.pop(i).remove()
        for i in leaves.keys() - self._handles.keys():
            self._handles[i] = leaves[i].register_post_accumulate_grad_hook(self._on_gradient)
        self._fill_buckets([(x, along[i]) for i, x in leaves.items()])

    def _is_as_it_was(self, leaves: list[Tensor]) -> bool:
        """Whether these are the leaves that were found last, all of which get gradients, as they did then."""
        before, self._found = self._found, leaves
        known = len(leaves) == len(before) == len(self._handles)
        return known and all(map(is_, leaves, before)) and all(map(_trains, leaves))

    def _along(self, parameter: Tensor) -> Axis:
        """The ranks that sum the gradients of ``parameter``."""
        if isinstance(parameter, Stored):
            # Along the others its use has averaged.
            return self._stored if parameter.split_over is None else self._nobody
        return self._split if isinstance(parameter, ShardedTensor) else self._axis

    def _fill_buckets(self, leaves: list[tuple[Tensor, Axis]]) -> None:
        buckets: list[Bucket] = []
        filling: dict[tuple[torch.dtype, torch.device, int], Bucket] = {}
        for x, axis in reversed(leaves):  # about the order in which backward reaches them
            key = (x.dtype, x.device, id(axis))
            if key not in filling or filling[key].nbytes + x.numel() * x.element_size() > self._bucket_bytes:
                filling[key] = Bucket(axis, 1 if axis is self._stored else self._copies)
                buckets.append(filling[key])
            filling[key].leaves.append(x)
        self._buckets = Buckets(self._axis, buckets)

    def _on_gradient(self, x: Tensor) -> None:
        if self._delivers:
            return
        self._touched.add(id(x))
        self._reached = True
        if self.blocked:
            return
        if self._buckets.has_left(x):
            raise RuntimeError(
                f"The gradient of {self._name(x)!r} changed after it was sent to the other replicas. Reentrant "
                "checkpointing does this: write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        grad = x.grad
        if grad is not None and grad.is_sparse:
            raise TypeError(f"{self._name(x)!r} has a sparse gradient; make its layer with sparse=False.")
        self._buckets.arrive(x, _grad)

    def _name(self, x: Tensor) -> str:
        return next((name for name, p in self._module.named_parameters() if leaf(p) is x), "a parameter")


_trains = attrgetter("requires_grad")


def _shares_of(bucket: Bucket) -> int:
    """How many ranks have shares of one gradient; 0 where each rank has all of one."""
    count = bucket.axis.size // bucket.copies
    return count if count > 1 else 0


def _grad(x: Tensor) -> Tensor | None:
    return x.grad


@torch.no_grad()
def _write(averaged: Iterable[tuple[Tensor, Tensor]]) -> None:
    for x, grad in averaged:
        if x.grad is None:
            x.grad = grad.clone()  # a view would keep the bucket in memory
        else:
            x.grad.copy_(grad)


def _refuse_sparse(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"{name!r} is an {type(child).__name__} with sparse=True. Sparse gradients can't be averaged over "
                "ranks that hold the same weights: make it with sparse=False, or use a layout that has none "
                "(data_parallel_size=1, no sequence axis)."
            )


def runs_too_early(name: str | None) -> RuntimeError:
    """What to say of a user's hook that would meet the parameter ``name`` before its gradient is synced."""
    return RuntimeError(
        f"{name!r} has a hook of `register_post_accumulate_grad_hook`, which runs before the ranks' gradients are "
        "synced. Do it in on_before_optimizer_step."
    )
