"""Operations in NCCL's order: each waits in a queue until those before it have ended, on all ranks that take part."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.private.process_groups import closed_by_peer
from tests.gpu_rules import deadlock, report
from tests.gpu_rules.memory import fingerprint, spoil
from tests.gpu_rules.report import Part, Rules
from tests.gpu_rules.sites import purpose, site


@dataclass
class Operation:
    """A collective or a message.

    Attributes:
        kind: as "allreduce" or "send".
        run: does it by gloo, once it is its turn.
        part: what it is on all ranks.
        reads: CPU tensors that must not be written to until it has ended.
        writes: CPU tensors that must not be read until it has ended.
        peer: of a message, the other rank in the communicator.
        result: tensors of the device that hold what it came to, for who asks for a future.
        back: tensors of a real device, and what is copied to them by who waits.
    """

    kind: str
    run: Callable[[], None]
    part: Part
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()
    peer: int | None = None
    result: Sequence[Tensor] = ()
    back: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def numel(self) -> int:
        return sum(x.numel() for x in self.reads or self.writes)

    def __str__(self) -> str:
        if self.peer is None:
            return self.kind
        sender, receiver = self.part.ranks
        return f"send to rank {receiver}" if self.kind == "send" else f"recv from rank {sender}"


class Entry(dist.Work):
    """An entry of a queue: an operation, or a batch of them that starts as one and has ended when all have."""

    def __init__(self, communicator: str, operations: Sequence[Operation], rules: Rules, device: Any) -> None:
        super().__init__()
        self.operations, self.communicator, self.rules, self.device = operations, communicator, rules, device
        self.done, self.error, self.waited = threading.Event(), None, False
        self.bringing = threading.Lock()
        self.purpose, self.site = purpose(), site()
        self.kind = operations[0].kind if len(operations) == 1 else "batch"
        self.before = fingerprint(self.reads) if rules.checks else 0
        numel = sum(operation.numel for operation in operations)
        parts = tuple(operation.part for operation in operations)
        report.note_issued(report.Issued(self.kind, parts, numel, self.purpose, self.site))
        if rules.checks:
            for operation in operations:
                for x in operation.writes:
                    spoil(x)

    @property
    def reads(self) -> list[Tensor]:
        return [x for operation in self.operations for x in operation.reads]

    def __str__(self) -> str:
        within = "" if self.kind != "batch" else f" of {', '.join(map(str, self.operations))}"
        return f"{self.kind if within else self.operations[0]}{within} on {self.communicator} at {self.site}"

    def violate(self, kind: str, details: str = "") -> None:
        report.violate(kind, self.site, self.purpose, details)

    def run(self) -> None:
        if self.rules.delay:
            time.sleep(self.rules.delay)
        if self.rules.checks and self.before != fingerprint(self.reads):
            self.violate("written to between issue and start", str(self))
        runs = _in_sequence(self.operations)
        errors: list[BaseException] = []
        others = [threading.Thread(target=_caught, args=(run, errors), daemon=True) for run in runs[1:]]
        for thread in others:
            thread.start()
        _caught(runs[0], errors)
        for thread in others:
            thread.join()
        if errors:
            raise errors[0]

    # ------------------------------------------------------------------------------------------ the face of a Work

    def wait(self, timeout: Any = None) -> bool:
        self.waited = True
        if not self.done.is_set():
            deadlock.wait(self)
        if self.error is not None:
            raise self.error
        self._bring_back()
        return True

    @torch.no_grad()
    def _bring_back(self) -> None:
        with self.bringing:
            for operation in self.operations:
                for x, copy in operation.back:
                    with torch.inference_mode(x.is_inference()):
                        x.detach().copy_(copy)  # no write that autograd counts, as none of NCCL's is
                operation.back = ()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def exception(self) -> Any:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [x for operation in self.operations for x in operation.result]

    def get_future(self) -> Any:
        on_cuda = self.device.type == "cuda"
        future: Any = torch.futures.Future(devices=[torch.cuda.current_device()] if on_cuda else None)

        def finish() -> None:
            self.done.wait()
            self._bring_back()
            future.set_result(self.result())

        self.waited = True
        threading.Thread(target=finish, daemon=True).start()
        return future

    def __del__(self) -> None:
        if not self.waited and any(operation.kind != "send" for operation in self.operations):
            report.note_never_waited(self.kind, self.site)


def _caught(run: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        with torch.inference_mode():  # the host may have issued it in that mode, which is a thread's
            run()
    except BaseException as error:  # goes to whoever waits
        errors.append(error)


def _in_sequence(operations: Sequence[Operation]) -> list[Callable[[], None]]:
    """What runs beside each other: messages of one pair and direction keep their order, and so do collectives."""
    lines: dict[Any, list[Operation]] = {}
    for operation in operations:
        lines.setdefault(None if operation.peer is None else (operation.kind, operation.peer), []).append(operation)

    def one_after_another(line: list[Operation]) -> Callable[[], None]:
        return lambda: [operation.run() for operation in line] and None

    return [one_after_another(line) for line in lines.values()]


@dataclass
class Queue:
    """Runs its entries one after another, in a thread of its own."""

    name: str
    pending: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.issued: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"queue of {self.name}", daemon=True).start()
        self.users = 0
        alive.append(self)

    def add(self, entry: Entry) -> Entry:
        self.pending.append(entry)
        self.issued.put(entry)
        return entry

    def close(self) -> None:
        """One communicator fewer uses it; after the last, the thread ends, once it has done what it has."""
        self.users -= 1
        if self.users <= 0 and self in alive:
            self.issued.put(None)
            alive.remove(self)

    def _work(self) -> None:
        while True:
            entry = self.issued.get()
            if entry is None:
                return
            try:
                entry.run()
            except BaseException as error:
                entry.error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
                if not closed_by_peer(error):  # that one has failed, and says so
                    entry.violate("failed", str(error)[:300])
            self.pending.remove(entry)
            deadlock.note_end()
            entry.done.set()
            del entry  # its buffers go with it, not with the next


alive: list[Queue] = []
"""The queues of this process."""


def synchronize() -> None:
    """As ``torch.cuda.synchronize()``: waits for all that was issued, on every communicator."""
    for each in list(alive):
        for entry in list(each.pending):
            deadlock.wait(entry)
