"""A process group over gloo that keeps NCCL's rules.

One communicator has one queue of operations on each rank (NCCL's stream of the communicator; messages that are not
batched, in eager mode, go through the very same queue as collectives). An operation runs when it is at the head of the
queue of every rank that takes part. A send holds up its queue until the receiver's queue has come to the matching
receive. Tags are ignored, as NCCL does, but compared: a message that gloo would have told apart by its tag is a
violation. What stands between ``_start_coalescing`` and ``_end_coalescing``, as that of ``batch_isend_irecv``, is one
entry.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

from tests.gpu_rules import report
from tests.gpu_rules.memory import is_fake, on_host
from tests.gpu_rules.queues import Entry, Operation, Queue, alive
from tests.gpu_rules.report import Part, Rules
from tests.gpu_rules.sites import purpose, site

_DTYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_READY, _HEADER, _DATA, _ROWS = 91, 92, 93, 77  # gloo's tags of our own messages
UNBATCHED = "a message that is not batched, on a communicator of more than two ranks"
_LONGEST = 1024  # bytes of what ranks compare before a collective


class StrictGroup(dist.ProcessGroup):
    """Args:
    store: of this group alone.
    rank: in the group.
    ranks: global ranks.
    timeout: gloo's.
    device: type of the tensors that it takes.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout: Any, device: str, name: str) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self.ranks, self._size, self._name = rank, tuple(ranks), len(ranks), name
        self.device = torch.device(device)
        self.gloo = dist.ProcessGroupGloo(store, rank, len(ranks), timeout=timeout)
        self.rules = Rules.from_environment()
        self.key = f"communicator {len(report.current().groups)} of ranks {', '.join(map(str, ranks))}"
        self.counts: Counter[Any] = Counter()
        self.batch: list[Operation] | None = None
        report.note_group(self.ranks)
        self.queue = _queue(self.key, self.rules)
        self.queue.users += 1

    # ----------------------------------------------------------------------------------------- what torch asks for

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802
        return self._name

    def _set_sequence_number_for_group(self) -> None: ...

    def shutdown(self) -> None:
        self.queue.close()

    def __repr__(self) -> str:
        return f"StrictGroup({self.key})"

    # ------------------------------------------------------------------------------------------------- the queue

    def _issue(self, operation: Operation) -> dist.Work | None:
        if self.batch is not None:
            self.batch.append(operation)
            return None  # as NCCL's: only the batch can be waited for
        return self.queue.add(Entry(self.key, [operation], self.rules, self.device))

    def _start_coalescing(self, device: Any) -> None:
        assert self.batch is None, "a batch in a batch"
        self.batch = []

    def _end_coalescing(self, device: Any) -> dist.Work | None:
        operations, self.batch = self.batch, None
        return self.queue.add(Entry(self.key, operations, self.rules, self.device)) if operations else None

    def _hosts(self, tensors: Sequence[Tensor], message: bool = False) -> list[Tensor]:
        """The memory of ``tensors``, which must be such as NCCL takes."""
        for x in tensors:
            if x.device.type != self.device.type:
                _told(f"a tensor on {x.device.type} given to {self._name}", x)
                raise RuntimeError(f"No backend type associated with device type {x.device.type} (strict)")
            if x.layout != torch.strided:
                _told("a sparse tensor", x)
            elif not (message or _is_dense(x)):
                _told("a tensor that is not contiguous", x)
            if x.dtype not in _DTYPES:
                _told("a dtype that NCCL lacks", x)
        return [on_host(x) for x in tensors]

    # ----------------------------------------------------------------------------------------------- collectives

    def _collective(
        self,
        kind: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[], Any],
        result: Sequence[Tensor] = (),
        **alike: Any,
    ) -> dist.Work | None:
        """``alike``: what must be the same on all ranks, besides dtypes and shapes unless it says "form"."""
        alike = {"kind": kind, "form": [[list(x.shape), str(x.dtype)] for x in reads][:20], **alike}
        if any(map(is_fake, (*reads, *writes))):
            return FakeWork()
        part = Part(self.ranks, self.key, self._next("collective"))

        def compare_and_run() -> None:
            if self.rules.checks:
                self._compare(alike)
            run()

        return self._issue(Operation(kind, compare_and_run, part, reads, writes, result=result))

    def _next(self, what: Any) -> int:
        self.counts[what] += 1
        return self.counts[what]

    def _compare(self, alike: dict[str, Any]) -> None:
        """All ranks of the communicator must be at the same collective."""
        text = json.dumps(alike, sort_keys=True).encode()[:_LONGEST]
        own = torch.zeros(_LONGEST, dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        others = [torch.zeros(_LONGEST, dtype=torch.uint8) for _ in self.ranks]
        self.gloo.allgather([others], [own]).wait()
        told = {bytes(x.numpy().tobytes()).rstrip(b"\0").decode() for x in others}
        if len(told) > 1:
            raise RuntimeError(f"ranks are at different collectives (strict): {sorted(told)}")

    def _sum_(self, x: Tensor, op: Any) -> None:
        average = op == dist.ReduceOp.AVG  # gloo has none
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else op
        self.gloo.allreduce([x], options).wait()
        if average:
            x.div_(self._size)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        hosts = self._hosts(tensors)
        entry = self._collective("allreduce", hosts, (), lambda: [self._sum_(x, op) for x in hosts], op=_name_of(op))
        if entry is not None:
            entry.result = lambda: tensors
        return entry

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
            _told("all_gather of unequal shapes", ins[0])
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
            _told("reduce_scatter of unequal shapes: NCCL does n reduces in turn", ins[0])

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

    # -------------------------------------------------------------------------------------------------- messages

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work | None:
        (x,) = self._hosts(tensors, message=True)

        def run() -> None:
            self.gloo.recv([torch.zeros(1, dtype=torch.int64)], peer, _READY).wait()
            self.gloo.send([torch.tensor([tag, x.numel() * x.element_size()])], peer, _HEADER).wait()
            self.gloo.send([x], peer, _DATA).wait()

        return self._message("send", run, [x], [], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work | None:
        (x,) = self._hosts(tensors, message=True)
        wanted = [tag, x.numel() * x.element_size()]

        def run() -> None:
            self.gloo.send([torch.zeros(1, dtype=torch.int64)], peer, _READY).wait()
            header = torch.zeros(2, dtype=torch.int64)
            self.gloo.recv([header], peer, _HEADER).wait()
            if header.tolist() != wanted:
                raise RuntimeError(
                    f"by NCCL's order another message comes here (strict): [tag, bytes] {header.tolist()}, not {wanted}"
                )
            self.gloo.recv([x], peer, _DATA).wait()

        return self._message("recv", run, [], [x], peer)

    def _message(
        self, kind: str, run: Callable[[], None], reads: list[Tensor], writes: list[Tensor], peer: int
    ) -> dist.Work | None:
        if any(map(is_fake, (*reads, *writes))):
            return FakeWork()
        if self._size > 2 and self.batch is None:
            report.violate(UNBATCHED, site(), purpose(), f"{self._size} ranks")
        pair = (self._rank, peer) if kind == "send" else (peer, self._rank)
        part = Part((self.ranks[pair[0]], self.ranks[pair[1]]), self.key, self._next(pair))
        return self._issue(Operation(kind, run, part, reads, writes, peer))


def _queue(key: str, rules: Rules) -> Queue:
    if rules.queue == "communicator":
        return Queue(key)
    return next((queue for queue in alive if queue.name == "all communicators"), None) or Queue("all communicators")


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _told(kind: str, x: Tensor) -> None:
    report.violate(kind, site(), purpose(), f"{list(x.shape)} {x.dtype}")


def _name_of(op: Any) -> str:
    names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
    return next((name for name in names if op == getattr(dist.ReduceOp, name)), str(op))


def _overlap(outer: Tensor, inner: Tensor) -> bool:
    return outer.untyped_storage().data_ptr() == inner.untyped_storage().data_ptr()
