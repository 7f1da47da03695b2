"""The ranks of one mesh axis as threads of this process, for tests of what needs no process group.

One rank runs at a time, until it meets a collective; the others then run up to theirs. What there is once a process
(torch's generator, and which run is the current one) is exchanged with the rank, so each has its own.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.sharded.run_state import RunState

_PATIENCE = 100.0  # seconds; a wait this long is a deadlock that the checks below did not see


class _Meeting:
    """Where ranks exchange values. Its lock is held by the rank that runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Condition()
        self.offers: dict[int, tuple[Any, Any]] = {}
        self.met: list[Any] = []
        self.round = 0
        self.finished = 0
        self.failures: list[str] = []
        self.mail: dict[Any, list[Tensor]] = {}  # sent and not yet received, by (sender, receiver, tag)

    def exchange(self, rank: int, what: Any, value: Any) -> list[Any]:
        """Every rank's ``value``; ``what`` must be equal on all."""
        self.offers[rank] = (what, value)
        current = self.round
        if len(self.offers) == self.size:
            self._close_round()
        else:
            self._look_for_deadlock()
            state = _process_state()
            self.lock.wait_for(lambda: self.round > current or self.failures, timeout=_PATIENCE)
            _restore(state)
        if self.failures or self.round == current:
            raise _Stopped
        return self.met

    def _close_round(self) -> None:
        kinds = {what for what, _ in self.offers.values()}
        if len(kinds) > 1:
            self.fail(f"ranks meet at different collectives: { {r: w for r, (w, _) in sorted(self.offers.items())} }")
        self.met = [self.offers[rank][1] for rank in range(self.size)]
        self.offers = {}
        self.round += 1
        self.lock.notify_all()

    def _look_for_deadlock(self) -> None:
        if self.offers and len(self.offers) + self.finished == self.size:
            self.fail(f"ranks {sorted(self.offers)} wait at {next(iter(self.offers.values()))[0]}, the others returned")

    def fail(self, why: str) -> None:
        self.failures.append(why)
        self.lock.notify_all()
        raise _Stopped

    def send(self, key: Any, value: Tensor) -> None:
        self.mail.setdefault(key, []).append(value)
        self.lock.notify_all()

    def receive(self, key: Any) -> Tensor:
        """The next message for ``key``."""
        state = _process_state()
        self.lock.wait_for(lambda: self.mail.get(key) or self.failures, timeout=_PATIENCE)
        _restore(state)
        if not self.mail.get(key):
            self.fail(f"nobody sends the message (sender, receiver, tag) {key}")
        return self.mail[key].pop(0)

    def finish(self) -> None:
        self.finished += 1
        self._look_for_deadlock()


class _Stopped(BaseException):
    """Another rank failed."""


def _process_state() -> tuple[Tensor, RunState]:
    return torch.default_generator.get_state(), RunState.current


def _restore(state: tuple[Tensor, RunState]) -> None:
    torch.default_generator.set_state(state[0])
    RunState.current = state[1]


def _of_rank(state: tuple[Tensor, RunState]) -> tuple[Tensor, RunState]:
    """A rank's own, which begins as ``state`` does."""
    own = RunState()
    vars(own.streams).update(vars(state[1].streams))
    own.shared, own.shared_backward = state[1].shared, state[1].shared_backward
    return state[0], own


class _Received:
    """A message on its way into ``x``."""

    def __init__(self, meeting: _Meeting, key: Any, x: Tensor) -> None:
        self.meeting, self.key, self.x = meeting, key, x

    def wait(self) -> None:
        value = self.meeting.receive(self.key)
        assert (value.shape, value.dtype) == (self.x.shape, self.x.dtype), "sent and received tensors differ in form"
        with torch.no_grad():
            self.x.copy_(value)


class _Sent:
    def wait(self) -> None:
        """It has left at once."""


class ThreadAxis(Axis):
    """An axis whose ranks are threads.

    As strict as gloo: contiguous messages of equal shape and dtype, and a maximum that may lose a NaN.
    """

    def __init__(self, size: int, rank: int, meeting: _Meeting, name: str = "tensor") -> None:
        super().__init__(name, tuple(range(size)), rank, None)
        self._meeting = meeting
        self.gathered: list[str] = []

    def about_to_gather(self, func: Any, x: Tensor) -> None:
        self.gathered.append(getattr(func, "__name__", str(func)))

    def _meet(self, verb: Any, purpose: str, value: Any, *details: Any) -> list[Any]:
        if isinstance(value, Tensor):
            assert type(value) is Tensor, f"{verb} of a {type(value).__name__}"
            assert value.is_contiguous(), f"{verb} of a tensor that is not contiguous"
            details = (*details, tuple(value.shape), value.dtype)
            value = value.detach().clone()
        return self._meeting.exchange(self.rank, (verb, purpose, *details), value)

    def start_all_reduce_(self, x: Tensor, purpose: str, op: Any = "sum") -> None:
        if self.size == 1:
            return
        self._log("all_reduce", purpose, x.numel(), x.numel() * x.element_size())
        parts = self._meet("all_reduce", purpose, x, op)
        total = parts[0]
        for part in parts[1:]:
            if op == "sum":
                total = total + part
            else:
                total = torch.where(total < part if op == "max" else part < total, part, total)
        with torch.no_grad():
            x.copy_(total)

    def all_gather(self, x: Tensor, purpose: str, shape: Sequence[int] | None = None) -> Tensor:
        out = x.new_empty((self.size, *x.shape) if shape is None else tuple(shape))
        if self.size > 1:
            self._log("all_gather", purpose, x.numel() * self.size, x.numel() * x.element_size() * self.size)
        parts = self._meet("all_gather", purpose, x.contiguous()) if self.size > 1 else [x]
        with torch.no_grad():
            out.view(self.size, *x.shape).copy_(torch.stack(parts))
        return out

    def reduce_scatter(self, parts: list[Tensor], purpose: str) -> Tensor:
        if self.size == 1:
            return parts[0]
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._log("reduce_scatter", purpose, flat.numel(), flat.numel() * flat.element_size())
        total = sum(self._meet("reduce_scatter", purpose, flat))
        own = total.split([part.numel() for part in parts])[self.rank]  # type: ignore[union-attr]
        return own.clone().view(parts[self.rank].shape)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int], purpose: str) -> Tensor:
        if self.size == 1:
            return x
        assert x.is_contiguous() and sum(sent) == len(x)
        self._log("all_to_all", purpose, x.numel(), x.numel() * x.element_size())
        pieces = [piece.clone() for piece in x.detach().split(sent)]
        got = [each[self.rank] for each in self._meet("all_to_all", purpose, pieces)]
        assert [len(piece) for piece in got] == received
        return torch.cat(got)

    def start_exchange(self, ops: Any) -> list[Any]:
        starts = {"send": self.start_send, "recv": self.start_recv_}
        return [starts[op.verb](op.x, op.peer, op.purpose, op.tag) for op in ops]

    def start_send(self, x: Tensor, to: int, purpose: str, tag: int = 0) -> Any:
        assert type(x) is Tensor and x.is_contiguous()
        self._log("send", purpose, x.numel(), x.numel() * x.element_size(), 2)
        self._meeting.send((self.rank, to, tag), x.detach().clone())
        return _Sent()

    def start_recv_(self, x: Tensor, source: int, purpose: str, tag: int = 0) -> Any:
        assert type(x) is Tensor and x.is_contiguous()
        self._log("recv", purpose, x.numel(), x.numel() * x.element_size(), 2)
        return _Received(self._meeting, (source, self.rank, tag), x)

    def broadcast_(self, x: Tensor, purpose: str, source: int = 0) -> Tensor:
        if self.size > 1:
            self._log("broadcast", purpose, x.numel(), x.numel() * x.element_size())
            x.copy_(self._meet("broadcast", purpose, x, source)[source])
        return x

    def broadcast_object(self, value: Any, purpose: str, source: int = 0) -> Any:
        return self._meet("broadcast_object", purpose, value, source)[source] if self.size > 1 else value

    def all_gather_object(self, value: Any, purpose: str) -> list[Any]:
        return list(self._meet("all_gather_object", purpose, value)) if self.size > 1 else [value]


class SequenceThreadAxis(ThreadAxis, SequenceAxis):
    """A sequence axis whose ranks are threads."""

    def __init__(self, size: int, rank: int, meeting: _Meeting, name: str = "sequence") -> None:
        super().__init__(size, rank, meeting, name)


def run_ranks(size: int, function: Callable[..., Any], *args: Any, kind: type[ThreadAxis] = ThreadAxis) -> list[Any]:
    """``function(axis, *args)`` on ``size`` ranks; their results in rank order.

    Example::

        def total(axis):
            return axis.all_reduce_(torch.tensor(axis.rank), "test").item()

        assert run_ranks(3, total) == [3, 3, 3]
    """
    if size == 1:
        return [function(kind(1, 0, _Meeting(1)), *args)]
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    start = _process_state()

    def body(rank: int) -> None:
        with meeting.lock:
            _restore(_of_rank(start))
            try:
                results[rank] = function(kind(size, rank, meeting), *args)
                meeting.finish()
            except _Stopped:
                pass
            except BaseException:
                meeting.failures.append(f"rank {rank}:\n{traceback.format_exc()}")
                meeting.lock.notify_all()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    _restore(start)
    if meeting.failures:
        raise AssertionError("\n".join(meeting.failures))
    assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
    return results
