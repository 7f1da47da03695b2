"""Boundary tensors on their way from stage to stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.waits import wait_for
from lightning_par.mesh.wire import Kind, PeerOp
from lightning_par.private.process_groups import closed_by_peer, has_gloo, timed_out
from lightning_par.trial.fake_functions import is_fake

MOST_UNDER_WAY = 8
"""Messages, on gloo: their memory is held until they have left."""
_PURPOSES: dict[Kind, str] = {"forward": "activations", "backward": "gradients of activations"}


class Outgoing(NamedTuple):
    """What is to be sent.

    Attributes:
        x: of any dtype and any strides; nobody may write to it until `Messenger.finish`.
        to: the receiver's index along the axis.
        kind: whether it is an activation or the gradient of one.
        tag: says, with the kind, which `Incoming` it is.
    """

    x: Tensor
    to: int
    kind: Kind
    tag: int

    @property
    def what(self) -> str:
        return f"Sending {_PURPOSES[self.kind]} to pipeline rank {self.to}"


class Incoming(NamedTuple):
    """What is to be received: what index ``source`` sends under ``kind`` and ``tag``."""

    shape: Sequence[int]
    dtype: torch.dtype
    source: int
    kind: Kind
    tag: int

    @property
    def what(self) -> str:
        return f"Receiving {_PURPOSES[self.kind]} from pipeline rank {self.source}"


@dataclass
class _Sent:
    """A message under way; what it holds must live until it has left."""

    work: dist.Work
    x: Tensor
    message: Outgoing
    batch: int  # in which it was sent, counted from the first on


class Messenger:
    """Sends stage boundary tensors along the pipeline axis.

    Nothing waits but the callables that `exchange` returns, and `finish`. The ranks must come to their exchanges as
    `Axis.start_exchange` says, unless the backend is gloo, which goes by the tag.

    Args:
        axis: the pipeline axis.
        device: where the tensors live.

    Example::

        messenger = Messenger(groups.pipeline, torch.device("cpu"))
        if groups.pipeline.rank == 0:
            messenger.exchange([Outgoing(x, 1, "forward", tag=0)], [])
        else:
            (wait,) = messenger.exchange([], [Incoming((4, 8), torch.float32, 0, "forward", tag=0)])
            x = wait()
        messenger.finish()
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._gloo = axis.size > 1 and has_gloo(axis.group, device.type)
        self._sending: _Departures | _Queue = _Departures() if self._gloo else _Queue()
        self._batches = 0
        self.timed = False  # whether `arrived` is told
        self.arrived = 0.0  # when the last message was there, by `clock`

    def exchange(self, sent: Sequence[Outgoing], received: Sequence[Incoming]) -> list[Callable[[], Tensor]]:
        """Begin to send and to receive, in one batch; a tensor with no elements stays where it is.

        Returns:
            For each of ``received`` a callable that waits for the tensor and returns it; it raises RuntimeError where
            it can't come, or has not in time.

        Raises:
            RuntimeError: one of these or an earlier message can't arrive, or has not in time.
        """
        self._sending.check()
        ops: list[PeerOp] = []
        leaving: list[Outgoing] = []
        coming: list[Incoming] = []
        for out in sent:
            x = self._outward(out.x)
            if x.numel():
                ops.append(PeerOp("send", x, out.to, _PURPOSES[out.kind], _tag(out.kind, out.tag)))
                leaving.append(out)
        rooms = [*map(self._room, received)]
        for one, x in zip(received, rooms, strict=True):
            if x.numel():
                ops.append(PeerOp("recv", x, one.source, _PURPOSES[one.kind], _tag(one.kind, one.tag)))
                coming.append(one)
        try:
            works = self._axis.start_exchange(ops)
        except RuntimeError as error:
            whats = [*(out.what for out in leaving), *(one.what for one in coming)]
            raise lost(" and ".join(dict.fromkeys(whats)), error) from error
        for out, op, work in zip(leaving, ops, works):
            self._sending.add(_Sent(work, op.x, out, self._batches))
        self._batches += 1
        arriving = iter(works[len(leaving) :])
        return [
            self._wait(one, x, next(arriving) if x.numel() else None) for one, x in zip(received, rooms, strict=True)
        ]

    def _outward(self, x: Tensor) -> Tensor:
        if x.layout != torch.strided:
            raise TypeError(f"A tensor of layout {x.layout} can't be sent to the next stage; call .to_dense() on it.")
        if is_fake(x) and not self._axis.dry:  # nothing would leave, and the receiver wait for it
            raise RuntimeError(
                "A value that stood for another stage's in a trial of the step has come into its run, as what a "
                "module is given by torch.func.functional_call. Give it as an argument of the module's forward."
            )
        x = x.detach().resolve_conj().resolve_neg()  # lazy bits don't travel with the memory
        return (x.cpu() if self._gloo else x).contiguous()  # gloo sends from the host's memory

    def _room(self, one: Incoming) -> Tensor:
        return torch.empty(tuple(one.shape), dtype=one.dtype, device="cpu" if self._gloo else self._device)

    def _wait(self, one: Incoming, x: Tensor, work: dist.Work | None) -> Callable[[], Tensor]:
        received, batch = _Received(work, x, one, self._device), self._batches - 1

        def wait() -> Tensor:
            there = received()
            if self.timed:
                self.arrived = self.clock()
            if work is not None:  # one without elements tells nothing
                self._sending.came(one.source, batch)
            return there

        return wait

    def clock(self) -> float:
        """Seconds; where they count, not before a GPU has computed what it was asked for."""
        if self.timed and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the device would wait for messages to leave, too
        return time.perf_counter()

    def finish(self) -> None:
        """Wait until everything has left; to be called at the end of a step.

        Raises:
            RuntimeError: a message can't arrive, or has not in time.
        """
        self._sending.finish()


def _tag(kind: Kind, tag: int) -> int:
    return 2 * tag + (kind == "backward")  # gloo tells messages apart by it alone, in both directions of the step


def lost(what: str, error: BaseException) -> RuntimeError:
    """What to raise where ``what``, which names a rank, has raised ``error``."""
    if timed_out(error):
        return RuntimeError(f"{what} failed: it did not come within the timeout; the process there may still run.")
    if closed_by_peer(error):
        return RuntimeError(f"{what} failed: the process there has closed the connection, as it ended or gave up.")
    return RuntimeError(f"{what} failed: {error}")


class _Received:
    """Waits for a message, once."""

    def __init__(self, work: dist.Work | None, x: Tensor, message: Incoming, device: torch.device) -> None:
        self._work = work
        self._x, self._message, self._device = x, message, device

    def __call__(self) -> Tensor:
        if self._work is not None:
            try:
                wait_for(self._work, self._message)
            except RuntimeError as error:
                raise lost(self._message.what, error) from error
            self._work, self._x = None, self._x.to(self._device)
        return self._x.to(self._device)


class _Queue:
    """Messages under way, where the backend says which have left."""

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()

    def add(self, sent: _Sent) -> None:
        self._sent.append(sent)

    def check(self) -> None:
        self._sent = deque(sent for sent in self._sent if not sent.work.is_completed())  # lets go of their memory

    def came(self, source: int, batch: int) -> None:
        """A message has come from ``source``, which was asked for in this batch."""

    def finish(self) -> None:
        while self._sent:
            _wait_for(self._sent.popleft())


class _Departures:
    """Messages under way on gloo, where a send tells that it has left only to who waits for it.

    When a message has come that was asked for later than another was sent, its sender has asked for that other one
    before: to wait for it then takes no longer than its way does. Where nothing comes back, as in steps without
    backwards, who sends is a few batches ahead.
    """

    def __init__(self) -> None:
        self._sent: dict[int, deque[tuple[int, _Sent]]] = {}  # by receiver, with their numbers
        self._number = self._count = 0  # of all so far, and of those that are kept

    def add(self, sent: _Sent) -> None:
        self._sent.setdefault(sent.message.to, deque()).append((self._number, sent))
        self._number, self._count = self._number + 1, self._count + 1

    def check(self) -> None:
        while self._count > MOST_UNDER_WAY:
            self._wait_for_first(min(filter(None, self._sent.values()), key=_number_of_first))

    def came(self, source: int, batch: int) -> None:
        sent = self._sent.get(source)
        while sent and sent[0][1].batch < batch:
            self._wait_for_first(sent)

    def finish(self) -> None:
        while self._count:
            self._wait_for_first(min(filter(None, self._sent.values()), key=_number_of_first))

    def _wait_for_first(self, sent: deque[tuple[int, _Sent]]) -> None:
        self._count -= 1
        _wait_for(sent.popleft()[1])


def _number_of_first(sent: deque[tuple[int, _Sent]]) -> int:
    return sent[0][0]


def _wait_for(sent: _Sent) -> None:
    try:
        wait_for(sent.work, sent.message)
    except RuntimeError as error:
        raise lost(sent.message.what, error) from error
