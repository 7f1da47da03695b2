"""Gradients of a block's weights, summed over the ranks in one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.fsdp.stored_parameter import PURPOSE
from lightning_par.mesh.host_values import agreed
from lightning_par.mesh.waits import wait_for

if TYPE_CHECKING:
    from lightning_par.fsdp.block_use import Use


class Sum:
    """Gradients on their way."""

    def __init__(self, sent: Tensor, out: Tensor, work: dist.Work | None, there: list[bool]) -> None:
        self.sent, self.out, self.work, self.there = sent, out, work, there

    @classmethod
    @torch.no_grad()
    def begun(cls, use: Use, gradients: tuple[Tensor | None, ...]) -> Sum:
        block, trains = use.block, use.trains
        flat = block.flat_of(trains)
        own = [g for g, trained in zip(gradients, trains) if trained]
        there = [g is not None for g in own]
        dtype = block.dtype
        if all(there):
            wholes = [g.to(dtype) for g in own]  # type: ignore[union-attr]
        else:
            like = use.locals[0]
            wholes = [like.new_zeros(shape) if g is None else g.to(dtype) for g, shape in zip(own, flat.shapes)]
        flags = None
        if len(own) > 1:  # whether any rank has a gradient goes along
            like = use.locals[0]
            flags = like.new_ones(1, len(own)) if all(there) else like.new_tensor([there])
        sent = flat.messages(wholes, flags)
        out, work = block.axis.start_reduce_scatter(sent, PURPOSE)
        return cls(sent, out, work, there)

    @torch.no_grad()
    def parts(self, use: Use) -> list[Tensor | None]:
        if self.work is not None:
            wait_for(self.work)
        flat = use.block.flat_of(use.trains)
        if use.block.axis.copies > 1:
            self.out.div_(use.block.axis.copies)
        found: list[Tensor | None] = [*flat.split(self.out)]
        if not all(self.there):  # reading it waits for the device
            anyones = agreed(self.out[flat.entries :], self.there, use.block.axis)
            found = [x if flag else None for x, flag in zip(found, anyones)]
        rest = iter(found)
        return [next(rest) if trained else None for trained in use.trains]
