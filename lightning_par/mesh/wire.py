"""How the tensors of an axis go through ``torch.distributed``, whose back ends differ in what they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.mesh.world_groups import host_group
from lightning_par.private.process_groups import has_gloo, kind_without_hosts, start_receive, start_send

Kind = Literal["forward", "backward"]


class PeerOp(NamedTuple):
    """One side of a message between two ranks of an axis.

    Attributes:
        verb: whether ``x`` is sent or overwritten.
        x: contiguous, of any dtype; not to be touched before it has left or come.
        peer: the other rank's index along the axis.
        purpose: for the ledger.
        tag: with gloo, says which send is for which receive; NCCL goes by the order.
    """

    verb: Literal["send", "recv"]
    x: Tensor
    peer: int
    purpose: str
    tag: int = 0


class Done(dist.Work):
    """Of a message that nobody waits for, since none was sent."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Wire:
    """The process group of the ranks along an axis.

    Args:
        ranks: the global ranks, in order.
        group: theirs; ``None`` only where there is one, or nothing moves.
    """

    def __init__(self, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self._ranks, self._group = ranks, group
        self._hosts: tuple[dist.ProcessGroup | None, str | None] | None = None
        self._by_tag: dict[str, bool] = {}
        self._peers: list[int] = []  # the ranks' numbers in the group

    def collective(self, call: Callable[..., dist.Work | None], *tensors: Tensor, **options: Any) -> dist.Work | None:
        """``call`` of ``torch.distributed``, which writes the first of ``tensors``; None where it has ended."""
        if tensors[0].device.type != "cpu":
            return call(*tensors, group=self._group, **options)
        # Shards that a callback keeps on the host: NCCL takes none.
        if self._hosts is None:
            group = host_group(self._group)
            self._hosts = group, kind_without_hosts(group)
        group, kind = self._hosts
        if kind is None:
            return call(*tensors, group=group, **options)
        with torch.no_grad():
            there = [x.to(kind) for x in tensors]
            call(*there, group=group, **{**options, "async_op": False})
            tensors[0].copy_(there[0])
        return None

    def exchange(self, ops: Sequence[PeerOp]) -> list[dist.Work]:
        """Begin to send and receive, all in one batch where the back end has such; returns a work for each."""
        if self._goes_by_tag(ops[0].x.device.type):
            return [self._start_message(op) for op in ops]
        functions = {"send": dist.isend, "recv": dist.irecv}
        works = dist.batch_isend_irecv(
            [dist.P2POp(functions[op.verb], raw_bytes(op.x), self._ranks[op.peer], self._group, op.tag) for op in ops]
        )
        return works if len(works) == len(ops) else [works[0]] * len(ops)  # NCCL has one for the whole batch

    def _goes_by_tag(self, kind: str) -> bool:
        """Whether messages between devices of ``kind`` are gloo's: then each goes by itself, and there is no batch."""
        known = self._by_tag.get(kind)
        if known is None:
            known = self._by_tag[kind] = has_gloo(self._group, kind)
            self._peers = [dist.get_group_rank(self._process_group, rank) for rank in self._ranks]
        return known

    def _start_message(self, op: PeerOp) -> dist.Work:
        # gloo sends memory as it lies, of any dtype
        x = op.x if op.x.is_contiguous() and not op.x.requires_grad else raw_bytes(op.x)
        start = start_send if op.verb == "send" else start_receive
        return start(self._process_group, x, self._peers[op.peer], op.tag)

    @property
    def _process_group(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        assert group is not None, "an axis sends once there are process groups"
        return group
