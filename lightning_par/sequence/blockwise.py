"""Attention of this rank's queries over the keys and values of all ranks, a block of them at a time.

What is computed stands here; how the blocks come by, and how their gradients get back to where they belong, is a
`BlockCarrier`'s: a ring, a gather, or nothing where every rank holds all keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.host_values import on_device
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.sequence import kernel
from lightning_par.sequence.attention_task import Step, Task
from lightning_par.sequence.block_carrier import BlockCarrier
from lightning_par.sequence.blocks import KernelCall
from lightning_par.sequence.deep_masks import top
from lightning_par.sequence.plain_kernel import Block, DrawnMask, DropoutMask, wide
from lightning_par.sharded.no_backward import differentiable_once
from lightning_par.sharded.random_streams import mix


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, task: Task, carrier: BlockCarrier) -> Tensor:
    """The exact attention of this rank's queries over all keys.

    Args:
        q: this rank's queries (B, H, T, d).
        k: this rank's keys (B|1, K, S, d); K divides H.
        v: this rank's values (B|1, L, S, e).
        mask: booleans or summands (B|1, H|1, T|1, all keys|1), this rank's rows; None where ``task.causal``.
        task: the rest.
        carrier: of the keys and values.

    Returns:
        (B, H, T, e), in the dtype of ``q``. Gradients of q, k, v and the mask are exact.

    Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).

    Example::

        q = torch.randn(1, 2, 4, 8)
        alone = Positions.of([0] * 4)
        out = attend(q, q, q, None, Task(alone, alone, 0, causal=True, scale=0.3), Whole())
        assert torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3), atol=1e-6)
    """
    return _Attention.apply(q, k, v, mask, task, carrier)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, task: Task, carrier: BlockCarrier
    ) -> Tensor:
        with _as_written(q):
            rows = _Forward(q, v, mask, task)
            came = carrier.forward(k, v, rows.meet)
            out, lse = rows.result(task.fused)
        # k and v are this rank's own: in backward the others' come by again, but for those that are kept
        ctx.save_for_backward(q, k, v, mask, out, lse, *came)
        ctx.task, ctx.carrier = task, carrier
        return out

    @staticmethod
    @differentiable_once("Attention over tokens that ranks share out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse, *came = ctx.saved_tensors
        need_q, need_k, need_v, need_mask = ctx.needs_input_grad[:4]
        with _as_written(q):
            rows = _Backward(q, mask, ctx.task, grad, out, lse, need_mask)
            k_grad, v_grad = ctx.carrier.backward(k, v, rows.meet, (need_k, need_v), came)
            q_grad = _added(rows.q_grad, None, q, slice(0)).to(q.dtype) if need_q else None
            mask_grad = None if rows.mask_grad is None else rows.mask_grad.to(mask.dtype)
        return q_grad, k_grad, v_grad, mask_grad, None, None


def _as_written(q: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which would round what is kept in float32."""
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _Rows:
    """The queries of this rank and their part of the mask."""

    def __init__(self, q: Tensor, mask: Tensor | None, task: Task) -> None:
        self.q = wide(q) if q.device.type == "cpu" else q  # what the kernel does there for each block
        self.mask, self.task = mask, task
        self.shift = top(mask) if mask is not None and task.deep else None

    def _calls(self, source: int) -> Iterable[Step]:
        """The kernel calls for the keys of ``source``; what the mask hides altogether is left out."""
        steps, is_plain = self.task.steps(source)
        return steps if is_plain and self.mask is None and not self.task.dropout else self._masked(source, steps)

    def _masked(self, source: int, steps: Iterable[Step]) -> Iterator[Step]:
        task = self.task
        for number, call, _ in steps:
            bias = self._bias(call, source)
            if bias is not None and _hides_all(bias):
                continue
            shift = self.shift
            if shift is not None and shift.shape[2] > 1:
                shift = shift[:, :, call.queries]
            draw = self._draw(number, call, source) if task.dropout else None
            yield Step(number, call, Block(call.causal, task.scale, bias, shift, draw))

    def _draw(self, number: int, call: KernelCall, source: int) -> DropoutMask | DrawnMask:
        task = self.task
        if task.kept is None:  # in backward drawn again
            return DropoutMask(task.dropout, mix(task.key, source, number))
        return DrawnMask(task.dropout, self._of_keys(task.kept[:, :, call.queries], call, source))

    def _bias(self, call: KernelCall, source: int) -> Tensor | None:
        if self.mask is None:
            return None if call.seen is None else _stairs(call, self.q.device)
        bias = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, call.queries]
        return bias if bias.shape[3] == 1 else self._of_keys(bias, call, source)

    def _of_keys(self, x: Tensor, call: KernelCall, source: int) -> Tensor:
        """The columns of ``x``, which has one for each key."""
        columns = self.task.keys.indices(source)[call.keys]
        if columns[-1] - columns[0] + 1 == len(columns):
            return x.narrow(3, int(columns[0]), len(columns))  # a view; what is not contiguous has to be copied
        return x.index_select(3, self._columns(call, source))

    def _columns(self, call: KernelCall, source: int) -> Tensor:
        return self.task.keys.index(source, self.q.device)[call.keys]


class _Forward(_Rows):
    def __init__(self, q: Tensor, v: Tensor, mask: Tensor | None, task: Task) -> None:
        super().__init__(q, mask, task)
        self.dtype = q.dtype
        self.shape = q.shape if q.shape[3] == v.shape[3] else (*q.shape[:3], v.shape[3])
        # Each query of a call sees a key of it; the kernel by hand tells -inf, too, where all scores are that.
        self.all_see = mask is None and bool(task.keys.size) and not task.dropout and self.shape == q.shape
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def meet(self, source: int, k: Tensor, v: Tensor) -> None:
        for _, call, block in self._calls(source):
            rows, keys = call.queries, call.keys
            out, lse = kernel.attend(_cut(self.q, rows), _cut(k, keys), _cut(v, keys), block)
            if self.out is None and out.shape[2] == self.shape[2]:
                self.out, self.lse = out, lse  # all queries meet this block first: there is nothing to merge with
                continue
            whole, sums = self._totals()
            kernel.merge_(_cut(whole, rows), _cut(sums, rows), out, lse, self.all_see)

    def _totals(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            like = wide(self.q)
            self.out = torch.zeros_like(like) if like.shape == self.shape else like.new_zeros(self.shape)
            self.lse = like.new_full(self.shape[:3], -torch.inf)  # the log of no weight at all
        return self.out, self.lse

    def result(self, fused: bool) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp as `kernel.attend_backward` takes it."""
        out, lse = self._totals()
        if self.all_see:
            return out.to(self.dtype), lse  # the first key, at least, is seen by all
        # so that in backward exp(score - lse) is 0 there, not NaN
        lse = lse.masked_fill(torch.isneginf(lse), torch.inf)
        # Beside -1e38 the sum of n weights is lost: one device then weighs each key by 1 in backward, not by 1 / n.
        return out.to(self.dtype), lse + self.shift.squeeze(-1) if fused and self.shift is not None else lse


class _Backward(_Rows):
    def __init__(
        self, q: Tensor, mask: Tensor | None, task: Task, grad: Tensor, out: Tensor, lse: Tensor, need_mask: bool
    ) -> None:
        super().__init__(q, mask, task)
        self.shift = None if task.fused else self.shift  # in the log-sum-exp already
        self.grad, self.out, self.lse = grad, out, lse
        self.q_grad: Tensor | None = None  # in float32: rounding of each block would add up
        self.mask_grad = torch.zeros_like(wide(mask)) if mask is not None and need_mask else None

    def meet(self, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k_grad, v_grad = None, None
        for _, call, block in self._calls(source):
            rows, keys = call.queries, call.keys
            q, grad, out, lse = _cut(self.q, rows), _cut(self.grad, rows), _cut(self.out, rows), _cut(self.lse, rows)
            parts = kernel.attend_backward(
                grad, q, _cut(k, keys), _cut(v, keys), out, lse, block, self.mask_grad is not None
            )
            self.q_grad = _added(self.q_grad, parts[0], self.q, rows)
            k_grad, v_grad = _added(k_grad, parts[1], k, keys), _added(v_grad, parts[2], v, keys)
            if parts[3] is not None:
                self._add_mask_grad(parts[3], call, source)
        # zeros where no query sees any of the block
        return _added(k_grad, None, k, slice(0)), _added(v_grad, None, v, slice(0))

    def _add_mask_grad(self, part: Tensor, call: KernelCall, source: int) -> None:
        assert self.mask_grad is not None
        total = self.mask_grad if self.mask_grad.shape[2] == 1 else self.mask_grad[:, :, call.queries]
        if total.shape[3] == 1:
            total += part
        else:
            total.index_add_(3, self._columns(call, source), part)


def _added(total: Tensor | None, part: Tensor | None, x: Tensor, rows: slice) -> Tensor:
    """The gradient of ``x``, after ``part`` of its ``rows``, if any, was added."""
    if total is None and part is not None and part.shape[2] == x.shape[2]:
        return part
    total = torch.zeros_like(wide(x)) if total is None else total
    if part is not None:
        _cut(total, rows).add_(part)
    return total


def _cut(x: Tensor, rows: slice) -> Tensor:
    """The ``rows`` of dim 2; itself where these are all."""
    count = rows.stop - rows.start
    return x if count == x.shape[2] else x.narrow(2, rows.start, count)


def _hides_all(bias: Tensor) -> bool:
    if bias.device.type != "cpu":
        return False  # to ask would hold up the device
    if isinstance(bias, FakeTensor):  # without values, as where a plan counts messages: nothing is known to be hidden
        return False
    return not bool(bias.any()) if bias.dtype == torch.bool else bool(torch.isneginf(bias).all())


def _stairs(call: KernelCall, device: torch.device) -> Tensor:
    """The mask (1, 1, T, S) of a call whose shape no kernel knows."""
    assert call.seen is not None
    seen = on_device(call.seen, torch.int64, device)
    keys = torch.arange(call.keys.stop - call.keys.start, device=device)
    return (keys < seen.unsqueeze(1))[None, None]  # [S] < [T, 1] -> [1, 1, T, S]
