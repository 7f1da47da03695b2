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
import copy
import cProfile
import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy
from tests.benchmarks.pipeline_step import GPT, WARM, Sizes, clocks, since

SIZES = Sizes(width=256, length=4096, vocabulary=512, layers=2)
SMALL = Sizes(width=32, length=64, vocabulary=64, layers=8)
aten: Any = torch.ops.aten


def own_tokens(length: int) -> Tensor:
    """Of 2c chunks, numbers r and 2c - 1 - r."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def rotated(kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every rank's keys and values, this one's first; the next ones travel while the caller computes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for hop in range(ranks):
        works: list[Any] = []
        received = kv
        if hop + 1 < ranks:
            received = torch.empty_like(kv)
            works = [dist.isend(kv, (rank + 1) % ranks), dist.irecv(received, (rank - 1) % ranks)]
        yield (rank - hop) % ranks, kv
        for work in works:
            work.wait()
        kv = received


def halves(source: int, tokens: int) -> tuple[slice, slice, bool]:
    """Which of this rank's queries see which of the keys of ``source``, and whether causally."""
    rank, everything = dist.get_rank(), slice(0, tokens)
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, tokens // 2), False
    return slice(tokens // 2, tokens), everything, False


class RingAttention(torch.autograd.Function):
    """Causal; q, k and v are (B, H, own tokens, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = torch.stack((k, v))
        whole: Tensor | None = None
        for source, (k_block, v_block) in rotated(kv):
            rows, keys, causal = halves(source, q.shape[2])
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, rows], k_block[:, :, keys], v_block[:, :, keys], 0.0, causal
            )
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
        home: list[tuple[Any, Any, Tensor, Tensor]] = []
        for source, (k_block, v_block) in rotated(kv):
            rows, keys, causal = halves(source, q.shape[2])
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, rows], q[:, :, rows], k_block[:, :, keys], v_block[:, :, keys],
                out[:, :, rows], lse[:, :, rows], 0.0, causal,
            )  # fmt: skip
            q_grad[:, :, rows] += dq
            if source == rank:
                kv_grad[0], kv_grad[1] = dk, dv
                continue
            sent, received = torch.zeros_like(kv), torch.empty_like(kv)
            sent[0, :, :, keys], sent[1, :, :, keys] = dk, dv
            giver = (2 * rank - source) % ranks
            home.append((dist.isend(sent, source, tag=1), dist.irecv(received, giver, tag=1), sent, received))
        for sending, arriving, _, received in home:
            arriving.wait()
            kv_grad += received
            sending.wait()
        return q_grad, kv_grad[0], kv_grad[1]


class ByHand:
    """The same training with tensors of this rank's tokens; made once there is a process group."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        tokens = own_tokens(ids.shape[1])
        x = self.model.tokens(ids[:, tokens]) + self.model.positions(tokens)
        for block in self.model.blocks:
            x = self._block(block, x)
        logits = self.model.head(self.model.norm(x)).flatten(0, 1)
        loss = F.cross_entropy(logits, ids[:, tokens].flatten(), reduction="sum") / ids.numel()
        loss.backward()
        self._sum_gradients()
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        self.loss = float(total)

    @staticmethod
    def _block(block: Any, x: Tensor) -> Tensor:
        parts = block.qkv(block.norm1(x)).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], block.heads, -1).transpose(1, 2) for y in parts)
        y = RingAttention.apply(q, k, v)
        x = x + block.proj(y.transpose(1, 2).reshape(x.shape))
        return x + block.mlp(block.norm2(x))

    def _sum_gradients(self) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


class OneDevice:
    """The same training by the first process alone."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        if dist.get_rank():
            return
        self.optimizer.zero_grad()
        loss = self.model.training_step(ids)
        loss.backward()
        self.optimizer.step()
        self.loss = float(loss)


class Rounds(Callback):
    """Takes the time of the Trainer's step, and makes the others before or after it."""

    def __init__(self, profile: str | None) -> None:
        self.profile = profile
        self.ours: list[list[float]] = []
        self.others: dict[str, list[list[float]]] = {"by hand": [], "one device": []}
        self.loss = 0.0
        self.profiler = cProfile.Profile(time.thread_time)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, GPT)
        self.loops = {
            "by hand": ByHand(copy.deepcopy(pl_module)),
            "one device": OneDevice(copy.deepcopy(pl_module)),
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % 2:
            self._others(batch, batch_idx)
        gc.collect()
        dist.barrier()
        if self.profile and batch_idx >= WARM:
            self.profiler.enable()
        self.began = clocks()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        dist.barrier()
        self.ours.append(since(self.began))
        self.profiler.disable()
        if not batch_idx % 2:
            self._others(batch, batch_idx)
        self.loss = float(outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.enable()
        if self.profile:
            self.profiler.dump_stats(f"{self.profile}.{dist.get_rank()}")

    def _others(self, batch: Tensor, batch_idx: int) -> None:
        # The loop by hand stands next to the Trainer's step.
        for name in sorted(self.loops, reverse=bool(batch_idx % 2)):
            gc.collect()
            dist.barrier()
            began = clocks()
            self.loops[name].step(batch)
            dist.barrier()
            self.others[name].append(since(began))


def show(name: str, rounds: Rounds) -> None:
    for what, place in (("time", 0), ("processor time of all ranks", 1)):
        ours, theirs = ([seconds[place] for seconds in side[WARM:]] for side in (rounds.ours, rounds.others[name]))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{what}: ours / {name}: median {statistics.median(ratios):.3f} of {len(ratios)} rounds "
            f"({min(ratios):.3f} to {max(ratios):.3f}); {statistics.median(ours) * 1e3:.1f} and "
            f"{statistics.median(theirs) * 1e3:.1f} ms a step"
        )


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
    rounds = Rounds(options.profile)
    trainer = Trainer(
        strategy=SequenceParallelStrategy(attention=options.attention, process_group_backend="gloo"),
        accelerator="cpu", devices=2, max_steps=WARM + options.rounds, callbacks=[rounds], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GPT(sizes), DataLoader([ids] * (WARM + options.rounds), batch_size=None))
    if dist.get_rank() == 0:
        by_hand, alone = (rounds.loops[name].loss for name in ("by hand", "one device"))
        print(f"losses {rounds.loss:.6f}, by hand {by_hand:.6f}, on one device {alone:.6f}")
        for name in rounds.loops:
            show(name, rounds)


if __name__ == "__main__":
    main()
