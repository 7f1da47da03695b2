"""A process group over gloo that keeps NCCL's rules.

One communicator has one queue of operations on each rank (NCCL's stream of the communicator; messages that are not
batched, in eager mode, go through the very same queue as collectives). An operation runs when it is at the head of the
queue of every rank that takes part. A send holds up its queue until the receiver's queue has come to the matching
receive. Tags are ignored, as NCCL does, but compared: a message that gloo would have told apart by its tag is a
violation. What stands between ``_start_coalescing`` and ``_end_coalescing``, as that of ``batch_isend_irecv``, is one
entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.gpu_rules.queued import UNBATCHED as UNBATCHED
from tests.gpu_rules.queued import QueuedGroup, told

_ROWS = 77  # gloo's tag of the rows of an all-to-all


class StrictGroup(QueuedGroup):
    """NCCL's collectives; see `QueuedGroup` for the arguments."""

    def _sum_(self, x: Tensor, op: Any) -> None:
        average = op == dist.ReduceOp.AVG  # gloo has none
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else op
        self.gloo.allreduce([x], options).wait()
        if average:
            x.div_(self._size, rounding_mode=None if x.is_floating_point() else "trunc")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        hosts = self._hosts(tensors)
        run = lambda: [self._sum_(x, op) for x in hosts]  # noqa: E731
        return self._collective("allreduce", hosts, (), run, tensors, op=_name_of(op))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work | None:
        hosts = self._hosts(tensors)
        reads, writes = (hosts, []) if opts.rootRank == self._rank else ([], hosts)
        form = [[list(x.shape), str(x.dtype)] for x in hosts]
        run = lambda: self.gloo.broadcast(hosts, opts).wait()  # noqa: E731
        return self._collective("broadcast", reads, writes, run, tensors, form=form, root=opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work | None:
        (host,) = self._hosts(tensors)

        def run() -> None:
            whole = host.clone()
            self._sum_(whole, opts.reduceOp)
            if opts.rootRank == self._rank:
                host.copy_(whole)

        return self._collective("reduce", [host], (), run, root=opts.rootRank, op=_name_of(opts.reduceOp))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        outs, ins = self._hosts(outputs[0]), self._hosts(inputs)
        if any(out.shape != ins[0].shape for out in outs):
            told("all_gather of unequal shapes", ins[0])
        return self._collective("allgather", ins, outs, lambda: self.gloo.allgather([outs], ins).wait())

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        return self._gather_singles([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        return self._gather_singles(outputs, inputs)

    def _gather_singles(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dist.Work | None:
        outs, ins = self._hosts(outputs), self._hosts(inputs)

        def run() -> None:
            for out, x in zip(outs, ins):
                own = x.clone()  # it may lie in the output
                self.gloo.allgather([list(out.view(-1).chunk(self._size))], [own.view(-1)]).wait()

        # In place, the input is a part of the output and must not be spoiled.
        inside = any(_overlap(out, x) for out in outs for x in ins)
        return self._collective("all_gather_single", ins, [] if inside else outs, run)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work | None:
        (out,), ins = self._hosts(outputs), self._hosts(inputs[0])
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if len({tuple(x.shape) for x in ins}) > 1:
            told("reduce_scatter of unequal shapes: NCCL does n reduces in turn", ins[0])

        def run() -> None:
            sums = [x.clone() for x in ins]
            for x in sums:
                self._sum_(x, op)
            out.copy_(sums[self._rank])

        return self._collective("reduce_scatter", ins, [out], run, op=_name_of(op))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        return self._scatter_singles([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        return self._scatter_singles(outputs, inputs, opts)

    def _scatter_singles(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work | None:
        outs, ins = self._hosts(outputs), self._hosts(inputs)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run() -> None:
            for out, x in zip(outs, ins):
                whole = x.clone()
                self._sum_(whole, op)
                out.copy_(whole.view(self._size, *out.shape)[self._rank])

        inside = any(_overlap(x, out) for out in outs for x in ins)
        return self._collective("reduce_scatter_single", ins, [] if inside else outs, run, op=_name_of(op))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any = None
    ) -> dist.Work | None:
        (out,), (x,) = self._hosts([output]), self._hosts([input])
        rows = list(in_splits) or [len(x) // self._size] * self._size
        room = list(out_splits) or [len(out) // self._size] * self._size
        run = lambda: self._exchange(x.split(rows), out.split(room))  # noqa: E731
        return self._collective("all_to_all_single", [x], [out], run, form=str(x.dtype))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        outs, ins = self._hosts(outputs), self._hosts(inputs)
        return self._collective("alltoall", ins, outs, lambda: self._exchange(ins, outs), form=str(ins[0].dtype))

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        received[self._rank].copy_(sent[self._rank])
        others = [rank for rank in range(self._size) if rank != self._rank]
        works = [self.gloo.send([sent[i].contiguous()], i, _ROWS) for i in others if sent[i].numel()]
        works += [self.gloo.recv([received[i]], i, _ROWS) for i in others if received[i].numel()]
        for work in works:
            work.wait()

    def barrier(self, opts: Any = None) -> dist.Work | None:
        return self._collective("barrier", (), (), lambda: self.gloo.barrier().wait())

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # their names before torch 2.13
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _name_of(op: Any) -> str:
    names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
    return next((name for name in names if op == getattr(dist.ReduceOp, name)), str(op))


def _overlap(outer: Tensor, inner: Tensor) -> bool:
    return outer.untyped_storage().data_ptr() == inner.untyped_storage().data_ptr()
