"""One rank of a communicator: a queue of operations in NCCL's order, and messages in it."""

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
_READY, _HEADER, _DATA = 91, 92, 93  # gloo's tags of our own messages
UNBATCHED = "a message that is not batched, on a communicator of more than two ranks"
_LONGEST = 1024  # bytes of what ranks compare before a collective


class QueuedGroup(dist.ProcessGroup):
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
        return f"{type(self).__name__}({self.key})"

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
        self._check(tensors, message)
        return [on_host(x) for x in tensors]

    def _check(self, tensors: Sequence[Tensor], message: bool) -> None:
        for x in tensors:
            if x.device.type != self.device.type:
                told(f"a tensor on {x.device.type} given to {self._name}", x)
                raise RuntimeError(f"No backend type associated with device type {x.device.type} (strict)")
            if x.layout != torch.strided:
                told("a sparse tensor", x)
            elif not (message or _is_dense(x)):
                told("a tensor that is not contiguous", x)
            if x.dtype not in _DTYPES:
                told("a dtype that NCCL lacks", x)

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


def told(kind: str, x: Tensor) -> None:
    """A rule was broken by what was given."""
    report.violate(kind, site(), purpose(), f"{list(x.shape)} {x.dtype}")
