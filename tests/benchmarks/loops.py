"""Loops written by hand that train `pipeline_step.GPT`: what a strategy's step is measured against.

Each is what someone writes who knows the layout and the model: plain tensors of this rank, messages where they must be,
nothing general. The ring is in `sequence_step`, the placement in `placement_step`. They run on gloo and on NCCL, where
messages that cross must go as one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.benchmarks import sequence_step
from tests.benchmarks.meter import device
from tests.benchmarks.pipeline_step import GPT, Block, HandStage, loss_of, owned
from tests.benchmarks.tensor_step import CopyToRanks, ReduceFromRanks


class Replicated:
    """Each rank takes its own samples; the gradients are averaged in one message."""

    def __init__(self, model: GPT) -> None:
        self.model, self.optimizer = model.to(device()), model.configure_optimizers()
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model.training_step(ids)
        loss.backward()
        sequence_step.sum_gradients(self.model, 1 / dist.get_world_size())
        self.optimizer.step()
        self.loss = float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        return {name: x.cpu() for name, x in self.model.state_dict().items()}


class FullyShard:
    """torch's ``fully_shard`` of each block and of the whole, as its guide has it."""

    def __init__(self, model: GPT) -> None:
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        self.model = model.to(device())
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.optimizer = model.configure_optimizers()
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.loss = float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu()
            for name, p in self.model.named_parameters()
        }


# -------------------------------------------------------------------------------------------------------------- tensor


def rows_of_rank(size: int, pieces: int, rank: int, ranks: int) -> Tensor:
    """Which of ``size`` rows, stacked of so many equal pieces as q, k and v are, a rank has: its part of each."""
    return torch.arange(size).view(pieces, ranks, -1)[:, rank].flatten()


class TensorBlock(nn.Module):
    """This rank's heads and columns of ``block``, between Megatron's f and g."""

    copy_to_ranks, reduce_from_ranks = staticmethod(CopyToRanks.apply), staticmethod(ReduceFromRanks.apply)

    def __init__(self, block: Block) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()

        def part(x: Tensor, dim: int, pieces: int = 1) -> nn.Parameter:
            return nn.Parameter(x.detach().index_select(dim, rows_of_rank(x.shape[dim], pieces, rank, ranks)))

        up, down = block.mlp[0], block.mlp[2]
        self.heads = block.heads // ranks
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv, self.qkv_bias = part(block.qkv.weight, 0, 3), part(block.qkv.bias, 0, 3)
        self.proj, self.proj_bias = part(block.proj.weight, 1), block.proj.bias
        self.up, self.up_bias = part(up.weight, 0), part(up.bias, 0)
        self.down, self.down_bias = part(down.weight, 1), down.bias

    def forward(self, x: Tensor) -> Tensor:
        parts = F.linear(self.copy_to_ranks(self.norm1(x)), self.qkv, self.qkv_bias).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.reduce_from_ranks(F.linear(y.reshape(*x.shape[:2], -1), self.proj)) + self.proj_bias
        y = F.gelu(F.linear(self.copy_to_ranks(self.norm2(x)), self.up, self.up_bias))
        return x + self.reduce_from_ranks(F.linear(y, self.down)) + self.down_bias

    def whole(self) -> dict[str, Tensor]:
        """The weights of the block that it is of."""

        def joined(x: Tensor, dim: int, pieces: int = 1) -> Tensor:
            ranks = dist.get_world_size()
            parts = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(parts, x.detach().contiguous())
            order = torch.cat([rows_of_rank(ranks * x.shape[dim], pieces, rank, ranks) for rank in range(ranks)])
            return torch.cat(parts, dim).index_select(dim, order.argsort().to(x.device))

        return {
            "qkv.weight": joined(self.qkv, 0, 3), "qkv.bias": joined(self.qkv_bias, 0, 3),
            "proj.weight": joined(self.proj, 1), "proj.bias": self.proj_bias,
            "mlp.0.weight": joined(self.up, 0), "mlp.0.bias": joined(self.up_bias, 0),
            "mlp.2.weight": joined(self.down, 1), "mlp.2.bias": self.down_bias,
            **{f"norm1.{name}": x for name, x in self.norm1.state_dict().items()},
            **{f"norm2.{name}": x for name, x in self.norm2.state_dict().items()},
        }  # fmt: skip


class Tensors:
    """Embeddings and head are whole, so that the blocks alone are compared."""

    block: type[TensorBlock] = TensorBlock

    def __init__(self, model: GPT) -> None:
        model.blocks = nn.ModuleList(self.block(block) for block in model.blocks)  # type: ignore[arg-type]
        self.model, self.optimizer = model.to(device()), model.configure_optimizers()
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model.training_step(ids)
        loss.backward()
        self.optimizer.step()
        self.loss = float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        rest = {name: x for name, x in self.model.state_dict().items() if not name.startswith("blocks.")}
        blocks: Iterable[Any] = self.model.blocks
        whole = {f"blocks.{i}.{name}": x for i, block in enumerate(blocks) for name, x in block.whole().items()}
        return {name: x.detach().cpu() for name, x in (rest | whole).items()}


# ------------------------------------------------------------------------------------------------------------ pipeline


class OneFOneB:
    """One stage a rank, 1F1B as Megatron has it: what crosses between two ranks goes as one batch.

    Args:
        model: to cut.
        cuts: before which blocks each stage begins, and the number of blocks.
        microbatches: of a batch.
    """

    def __init__(self, model: GPT, cuts: list[int], microbatches: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.first, self.last = self.rank == 0, self.rank == self.ranks - 1
        self.model, self.microbatches = model, microbatches
        self.stage = HandStage(model, *cuts[self.rank : self.rank + 2]).to(device())
        self.own = list(self.stage.parameters())
        self.optimizer = type(model).optimizer_of(self.own)
        self.width, self.dtype = model.norm.weight.shape[0], model.norm.weight.dtype
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        self.parts, self.losses = deque(ids.chunk(self.microbatches)), list[Tensor]()
        self.under_way: deque[tuple[Tensor, Tensor]] = deque()
        self.shape = (*self.parts[0].shape, self.width)
        warm = min(self.ranks - 1 - self.rank, self.microbatches)
        steady = self.microbatches - warm
        for _ in range(warm):
            self._exchange(down=self._forward(self._exchange(from_above=True)))
        x = self._exchange(from_above=True) if steady else None
        for i in range(steady):
            grad = self._exchange(down=self._forward(x), from_below=True)
            x = self._exchange(up=self._backward(grad), from_above=i + 1 < steady)
        for _ in range(warm):
            self._exchange(up=self._backward(self._exchange(from_below=True)))
        self.optimizer.step()
        if self.last:
            self.loss = float(torch.stack(self.losses).sum())

    def _forward(self, x: Tensor | None) -> Tensor:
        part = self.parts.popleft()
        x = part if x is None else x.requires_grad_()
        y = self.stage(x)
        if self.last:
            y = loss_of(y, part) / self.microbatches
            self.losses.append(y.detach())
        self.under_way.append((x, y))
        return y.detach()

    def _backward(self, grad: Tensor | None) -> Tensor | None:
        x, y = self.under_way.popleft()
        y.backward(grad)
        return x.grad

    def _exchange(
        self,
        down: Tensor | None = None,
        up: Tensor | None = None,
        from_above: bool = False,
        from_below: bool = False,
    ) -> Tensor | None:
        """Send ``down`` to the next stage or ``up`` to the one before, and wait for what comes; ends have none."""
        received = None
        operations: list[dist.P2POp] = []
        for x, end, peer in ((down, self.last, self.rank + 1), (up, self.first, self.rank - 1)):
            if x is not None and not end:
                operations.append(dist.P2POp(dist.isend, x, peer))
        for comes, end, peer in ((from_above, self.first, self.rank - 1), (from_below, self.last, self.rank + 1)):
            if comes and not end:
                received = torch.empty(self.shape, dtype=self.dtype, device=device())
                operations.append(dist.P2POp(dist.irecv, received, peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

    def weights(self) -> dict[str, Tensor]:
        return owned(self.model, self.own)


# ------------------------------------------------------------------------------------------------------------ sequence


class _Turned(torch.autograd.Function):
    """Ranks along dim ``split`` become ranks along dim ``join``: one all-to-all each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        ctx.dims = split, join
        return _turned(x, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        split, join = ctx.dims
        return _turned(grad, join, split), None, None


def _turned(x: Tensor, split: int, join: int) -> Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(), split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(received.unbind(), join)


class Ulysses(sequence_step.ByHand):
    """Neighbouring tokens a rank; around attention each rank has all tokens of some heads."""

    @staticmethod
    def own_tokens(length: int) -> Tensor:
        return torch.arange(length).chunk(dist.get_world_size())[dist.get_rank()].to(device())

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, heads, own tokens, d), as given."""
        qkv = _Turned.apply(torch.stack((q, k, v)), 2, 3)
        return _Turned.apply(F.scaled_dot_product_attention(*qkv, is_causal=True), 2, 1)
