"""Step time of an unmodified GPT under `SequenceParallelStrategy`, against a ring of local tensors written by hand.

Both live in two processes of one thread each and train on the same batches with AdamW, the one by a real Trainer with
``attention="ring"``, the other by a loop that knows its tokens: zigzag chunks, the CPU's flash kernel for each block
while the next one travels, the gradients summed in one message. A third one trains on one device: the first process
alone, one thread, while the other waits. Each batch is a round of the three, in turns of order: the Trainer's step is
taken from ``on_train_batch_start`` to ``on_train_batch_end``, and every step ends with a barrier. The figures are the
medians of the rounds' ratios; the bars are 1.05 of the loop by hand and 0.65 of one device. The losses of the last
batch are printed, too, as they must agree, and the ratio of the processor time, which a busy machine spoils less.

Run it on an idle machine with two cores; 15 rounds take about 3 minutes::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.sequence_step

``--small`` shows what is left where there is next to nothing to compute: the cost of a step in Python.
``--profile FILE`` writes which functions took the processor in the Trainer's steps, for ``pstats``, to ``FILE.0`` and
``FILE.1``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy
from tests.benchmarks.meter import PROCESSOR, SECONDS, WARM, device
from tests.benchmarks.pipeline_step import GPT, Sizes
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.trainer_side import QUIET

SIZES = Sizes(width=256, length=4096, vocabulary=512, layers=2)
SMALL = Sizes(width=32, length=64, vocabulary=64, layers=8)
aten: Any = torch.ops.aten


def rotated(kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every rank's keys and values, this one's first; the next ones travel while the caller computes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for hop in range(ranks):
        works: list[Any] = []
        received = kv
        if hop + 1 < ranks:
            received = torch.empty_like(kv)
            works = crossing(kv, (rank + 1) % ranks, received, (rank - 1) % ranks)
        yield (rank - hop) % ranks, kv
        for work in works:
            work.wait()
        kv = received


def crossing(sent: Tensor, to: int, received: Tensor, giver: int, tag: int = 0) -> list[Any]:
    """Under way, as one batch: on NCCL two ranks that send first would wait for each other."""
    operations = [dist.P2POp(dist.isend, sent, to, tag=tag), dist.P2POp(dist.irecv, received, giver, tag=tag)]
    return list(dist.batch_isend_irecv(operations))


def halves(source: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which of this rank's queries see which of the keys of ``source``, and whether causally."""
    rank, everything = dist.get_rank(), slice(0, tokens)
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, tokens // 2), False
    return slice(tokens // 2, tokens), everything, False


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Of a block of keys: what it gives, and the logarithm of the sum of its exponentials."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a block of keys, given what all of them together gave."""
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal)
    p = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.mT @ q, p.mT @ grad


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if causal else scores


class RingAttention(torch.autograd.Function):
    """Causal; q, k and v are (B, H, own tokens, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = torch.stack((k, v))
        whole: Tensor | None = None
        for source, (k_block, v_block) in rotated(kv):
            rows, keys, causal = halves(source, q.shape[2])
            out, lse = attention(q[:, :, rows], k_block[:, :, keys], v_block[:, :, keys], causal)
            if whole is None:
                whole, sums = out, lse
                continue
            part, total = whole[:, :, rows], sums[:, :, rows]
            part.lerp_(out, torch.sigmoid(lse - total).unsqueeze(-1))
            total.copy_(torch.logaddexp(total, lse))
        assert whole is not None
        ctx.save_for_backward(q, kv, whole, sums)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, kv, out, lse = ctx.saved_tensors
        ranks, rank = dist.get_world_size(), dist.get_rank()
        q_grad, kv_grad = torch.zeros_like(q), torch.empty_like(kv)
        home: list[tuple[list[Any], Tensor, Tensor]] = []
        for source, (k_block, v_block) in rotated(kv):
            rows, keys, causal = halves(source, q.shape[2])
            dq, dk, dv = attention_backward(
                grad[:, :, rows], q[:, :, rows], k_block[:, :, keys], v_block[:, :, keys],
                out[:, :, rows], lse[:, :, rows], causal,
            )  # fmt: skip
            q_grad[:, :, rows] += dq
            if source == rank:
                kv_grad[0], kv_grad[1] = dk, dv
                continue
            sent, received = torch.zeros_like(kv), torch.empty_like(kv)
            sent[0, :, :, keys], sent[1, :, :, keys] = dk, dv
            home.append((crossing(sent, source, received, (2 * rank - source) % ranks, tag=1), sent, received))
        for works, _, received in home:
            for work in works:
                work.wait()
            kv_grad += received
        return q_grad, kv_grad[0], kv_grad[1]


class ByHand:
    """The same training with tensors of this rank's tokens; made once there is a process group."""

    attend: Any = staticmethod(RingAttention.apply)  # of q, k and v, (B, H, own tokens, d)

    def __init__(self, model: GPT) -> None:
        self.model = model.to(device())
        self.optimizer = model.configure_optimizers()
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        tokens = self.own_tokens(ids.shape[1])
        x = self.model.tokens(ids[:, tokens]) + self.model.positions(tokens)
        for block in self.model.blocks:
            x = self._block(block, x)
        logits = self.model.head(self.model.norm(x)).flatten(0, 1)
        loss = F.cross_entropy(logits, ids[:, tokens].flatten(), reduction="sum") / ids.numel()
        loss.backward()
        sum_gradients(self.model)
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        self.loss = float(total)

    @staticmethod
    def own_tokens(length: int) -> Tensor:
        """Of 2c chunks, numbers r and 2c - 1 - r."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        chunks = torch.arange(length, device=device()).chunk(2 * ranks)
        return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])

    def _block(self, block: Any, x: Tensor) -> Tensor:
        parts = block.qkv(block.norm1(x)).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], block.heads, -1).transpose(1, 2) for y in parts)
        y = self.attend(q, k, v)
        x = x + block.proj(y.transpose(1, 2).reshape(x.shape))
        return x + block.mlp(block.norm2(x))

    def weights(self) -> dict[str, Tensor]:
        return {name: x.cpu() for name, x in self.model.state_dict().items()}


def sum_gradients(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Over the ranks, in one message."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    if scale != 1.0:
        flat *= scale
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


class OneDevice:
    """The same training by the first process alone."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = model.configure_optimizers()
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        if dist.get_rank():
            return
        self.optimizer.zero_grad()
        loss = self.model.training_step(ids)
        loss.backward()
        self.optimizer.step()
        self.loss = float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--attention", default="ring")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = SMALL if options.small else SIZES
    ids = torch.randint(0, sizes.vocabulary, (1, sizes.length))
    rounds = Rounds({"by hand": ByHand, "one device": OneDevice}, profile=options.profile)
    trainer = Trainer(
        strategy=SequenceParallelStrategy(attention=options.attention, process_group_backend="gloo"),
        accelerator="cpu", devices=2, max_steps=WARM + options.rounds, callbacks=[rounds], **QUIET,
    )  # fmt: skip
    trainer.fit(GPT(sizes), DataLoader([ids] * (WARM + options.rounds), batch_size=None))
    if dist.get_rank() == 0:
        by_hand, alone = (rounds.sides[name].loss for name in ("by hand", "one device"))
        print(f"losses {rounds.loss:.6f}, by hand {by_hand:.6f}, on one device {alone:.6f}")
        for name, theirs in rounds.others.items():
            for what, taken in (("time", SECONDS), ("processor time of all ranks", PROCESSOR)):
                print(f"{what}: ours / {name}: {Ratio.of(rounds.ours, theirs, taken)}")


if __name__ == "__main__":
    main()
