"""The verbs that move tensors along one mesh axis.

They are the only calls into ``torch.distributed`` on a training step's path, by `lightning_par.mesh.wire.Wire`; each
writes one `Transfer` into every open `ledger`. `lightning_par.mesh.collectives` builds autograd functions from them.
The ops are ``torch.distributed``'s own, never functional collectives: on gloo those abort at process exit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.ledger import Verb, is_open, note
from lightning_par.mesh.objects import broadcast_object
from lightning_par.mesh.progress import Begun, Progress
from lightning_par.mesh.waits import wait_for
from lightning_par.mesh.wire import Done, PeerOp, Wire
from lightning_par.mesh.world_groups import host_group
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.process_groups import is_fake
from lightning_par.private.storage import tensor_in
from lightning_par.trial.known_values import forget

if TYPE_CHECKING:
    from lightning_par.mesh.recorder import Recorder

# What functions of sharded tensors send for.
_OF_SHARDS = {"enter", "leave", "gather", "scatter", "loss", "extreme", "attention", "halo", "parameters", "aliases"}
# Reductions of equal values that leave them as they are.
_ALIKE = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Verbs:
    """What ranks along one mesh axis do together; a part of `lightning_par.mesh.axis.Axis`.

    All of them call a verb alike and in one order. ``purpose`` says in the ledger what it is for. Nothing is sent where
    the axis has size 1.

    Args:
        name: the axis' name in the mesh, e.g. ``"tensor"``.
        ranks: the global ranks along the axis through this rank, in order.
        rank: this process' index in ``ranks``.
        group: the process group of ``ranks``; ``None`` only where the axis has size 1.
    """

    dry = False
    """Whether no other rank is there, and nothing moves: what would is noted, and this rank stands for all."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.group = group
        self.guard: Callable[[], None] | None = None
        """Called before sharded tensors talk; see `lightning_par.mesh.handshake`."""
        self._wire = Wire(ranks, group)
        self.dry = is_fake(group)
        self._line = name, ranks
        # one that only pretends to move anything, as in a trial of the step, counts for itself
        self.progress = Progress() if group is None else Progress.current
        """What this rank has begun, in the run that the axis was made for."""
        self._count = self.progress.counter(self._line)
        self._sent, self._received = self.progress.messages(self._line)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def tells(self, source: int = 0) -> bool:
        """Whether it is for this rank to say what index ``source`` says to all: it is that one, or nobody else is."""
        return self.rank == source or self.dry

    def all_reduce_(self, x: Tensor, purpose: str, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """Reduce ``x`` in place over the axis; returns it. Booleans reduce as ``max`` (any) or ``min`` (all)."""
        work = self.start_all_reduce_(x, purpose, op)
        if work is not None:
            wait_for(work)
        return x

    def start_all_reduce_(self, x: Tensor, purpose: str, op: Literal["sum", "max", "min"] = "sum") -> dist.Work | None:
        """Begin an all-reduce of the contiguous ``x`` in place; the caller waits on what is returned, unless None."""
        if self.size == 1:
            return None
        self._log("all_reduce", purpose, x.numel(), x.numel() * x.element_size())
        return self._collective(dist.all_reduce, x, op=_OPS[op], async_op=True)

    def all_gather(self, x: Tensor, purpose: str, shape: Sequence[int] | None = None) -> Tensor:
        """Every rank's ``x`` (same shape on all ranks), in rank order.

        Args:
            x: of any strides.
            purpose: for the ledger.
            shape: of what is returned; by default a new first dim is that of the ranks.
        """
        shape = (self.size, *x.shape) if shape is None else shape
        gathered, work = self.start_all_gather(x.contiguous(), purpose, shape)
        if work is not None:
            wait_for(work)
        return gathered

    def start_all_gather(
        self, x: Tensor, purpose: str, shape: Sequence[int] | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, dist.Work | None]:
        """Begin to gather every rank's contiguous ``x``, one after another, in one piece of memory: that of ``out``.

        Returns:
            What will be there once the caller has waited, unless there is nothing to wait on: of ``shape``, by default
            of one dim. It is no view, into which user code could not write behind an autograd function.
        """
        if self.size == 1:
            return x if shape is None else x.view(shape), None
        self._log("all_gather", purpose, x.numel() * self.size, x.numel() * x.element_size() * self.size)
        if out is None:
            out = x.new_empty(x.numel() * self.size if shape is None else tuple(shape))
        return out, self._collective(dist.all_gather_into_tensor, out.view(-1), x.view(-1), async_op=True)

    def reduce_scatter(self, parts: list[Tensor], purpose: str) -> Tensor:
        """The sum over the ranks of their part for this rank: ``parts`` has one for each, alike on all ranks."""
        out, work, _sent = self.start_sum_of_parts(parts, purpose)
        if work is not None:
            wait_for(work)
        return out

    def start_reduce_scatter(
        self, x: Tensor, purpose: str, shape: Sequence[int] | None = None
    ) -> tuple[Tensor, dist.Work | None]:
        """Begin to sum over the ranks what the contiguous ``x`` has for this one: it has as much for each, in order.

        Returns:
            As `start_all_gather`; the caller keeps ``x`` until then.
        """
        if self.size == 1:
            return x if shape is None else x.view(shape), None
        self._log("reduce_scatter", purpose, x.numel(), x.numel() * x.element_size())
        out = x.new_empty(x.numel() // self.size if shape is None else tuple(shape))
        return out, self._collective(dist.reduce_scatter_tensor, out.view(-1), x.view(-1), async_op=True)

    def start_sum_of_parts(self, parts: list[Tensor], purpose: str) -> tuple[Tensor, dist.Work | None, Any]:
        """Begin a `reduce_scatter`.

        Returns:
            As `start_all_gather`, and what the caller keeps until then.
        """
        own = parts[self.rank]
        if self.size == 1:
            return own, None, None
        # Laid out once, where a list would be copied again. Parts that differ in size are padded to the largest: NCCL
        # sums unequal ones by a message for each rank.
        most = max(part.numel() for part in parts)
        pieces: list[Tensor] = []
        for part in parts:
            pieces.append(part.reshape(-1))
            if part.numel() < most:
                pieces.append(own.new_zeros(most - part.numel()))
        flat = torch.cat(pieces)
        if own.numel() == most:
            return *self.start_reduce_scatter(flat, purpose, own.shape), flat
        out, work = self.start_reduce_scatter(flat, purpose)
        own_rows = out[: own.numel()].view(own.shape)
        return tensor_in(out.untyped_storage(), out.dtype, 0, own.shape, own_rows.stride(), out.device), work, flat

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int], purpose: str) -> Tensor:
        """Exchange rows: rank i gets the next ``sent[i]`` rows of the contiguous ``x``.

        Returns:
            The ``received[i]`` rows of each rank i, one after another.
        """
        if self.size == 1:
            return x
        out = x.new_empty((sum(received), *x.shape[1:]))
        row = x[:1].numel() * x.element_size()
        self._log("all_to_all", purpose, x.numel(), sum(sent) * row, stays=sent[self.rank] * row)
        self._collective(dist.all_to_all_single, out, x, output_split_sizes=received, input_split_sizes=sent)
        return out

    def broadcast_(self, x: Tensor, purpose: str, source: int = 0) -> Tensor:
        """Overwrite the contiguous ``x`` with that of index ``source`` along the axis; returns it."""
        if self.size > 1:
            self._log("broadcast", purpose, x.numel(), x.numel() * x.element_size())
            if not self.dry or source != self.rank:  # whose own values stay known
                self._collective(dist.broadcast, x, src=self.ranks[source])
        return x

    def start_exchange(self, ops: Sequence[PeerOp]) -> list[dist.Work]:
        """Begin to send and receive, all in one batch, in which no side waits for another.

        Of two ranks, the one must send to the other in the order in which that one receives from it, within a batch and
        from batch to batch, and both must come to their batches and collectives of the axis in one order.

        Returns:
            What to wait on, for each of ``ops``; the caller keeps it, and the tensors, until it has waited.
        """
        if not ops:
            return []
        recorder: Recorder | None = self.progress.recorder
        begun: list[tuple[Begun, int]] = []
        for op in ops:
            if self.guard is not None and op.purpose in _OF_SHARDS:
                self.guard()
            if is_open():
                numel = op.x.numel()
                note(op.verb, self.name, op.purpose, numel, numel * op.x.element_size(), 2, None)
            counts = self._sent if op.verb == "send" else self._received
            counts[op.peer] += 1
            if recorder is not None:
                what = (self._line, counts[op.peer], op.verb, op.purpose, op.x.numel(), op.peer)
                begun.append((what, op.x.numel() * op.x.element_size()))
        self.progress.last = (self._line, counts[op.peer], op.verb, op.purpose, op.x.numel(), op.peer)
        if self.dry:
            for op in ops:
                if op.verb == "recv":
                    forget(op.x)
            return [Done()] * len(ops)
        if recorder is not None:
            return recorder.exchange(begun, partial(self._wire.exchange, ops))
        return self._wire.exchange(ops)

    def start_send(self, x: Tensor, to: int, purpose: str, tag: int = 0) -> dist.Work:
        """Begin to send ``x`` to index ``to``; see `PeerOp`."""
        return self.start_exchange([PeerOp("send", x, to, purpose, tag)])[0]

    def start_recv_(self, x: Tensor, source: int, purpose: str, tag: int = 0) -> dist.Work:
        """Begin to overwrite ``x`` with what index ``source`` sends; see `PeerOp`."""
        return self.start_exchange([PeerOp("recv", x, source, purpose, tag)])[0]

    def broadcast_object(self, value: Any, purpose: str, source: int = 0) -> Any:
        """``value`` of index ``source`` along the axis, pickled, on every rank; who `tells` it must have it."""
        if self.size == 1:
            return value
        self._log("broadcast", purpose, 1, 0)
        if self.dry:
            return value
        return self._timed(partial(broadcast_object, value, self.ranks[source], host_group(self.group)))

    def all_gather_object(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._log("all_gather", purpose, self.size, 0)
        if self.dry:
            return [value] * self.size
        self._timed(partial(dist.all_gather_object, values, value, group=host_group(self.group)))
        return values

    def _log(
        self, verb: Verb, purpose: str, numel: int, nbytes: int, ranks: int | None = None, stays: int | None = None
    ) -> None:
        if self.guard is not None and purpose in _OF_SHARDS:
            self.guard()
        self._count[0] += 1
        self.progress.last = (self._line, self._count[0], verb, purpose, numel, None)
        note(verb, self.name, purpose, numel, nbytes, ranks or self.size, stays)

    def _collective(self, call: Callable[..., dist.Work | None], *tensors: Tensor, **options: Any) -> dist.Work | None:
        """``call`` of ``torch.distributed``, which writes the first of ``tensors``; `_log` has noted it."""
        if self.dry:
            if options.get("op") not in _ALIKE:
                forget(tensors[0])
            return None
        if isinstance(tensors[0], FakeTensor):  # torch would take a number for it from `random`'s generator
            return None
        recorder, begun = self.progress.recorder, self.progress.last
        if recorder is None or begun is None:
            return self._wire.collective(call, *tensors, **options)
        nbytes = begun[4] * tensors[0].element_size()
        return recorder.call(begun, nbytes, partial(self._wire.collective, call, *tensors, **options))  # type: ignore[no-any-return]

    def _timed(self, call: Callable[[], Any]) -> Any:
        """``call``, of objects, which `_log` has noted."""
        recorder = self.progress.recorder
        return call() if recorder is None else recorder.call(self.progress.last, 0, call, of_objects=True)
