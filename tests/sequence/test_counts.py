"""What moves along the sequence axis in a step, what a rank computes and keeps for it, counted: the minimum, no more.

b sequences of s tokens, h features, kv features of keys, L layers, c ranks; C3 and C6 of the limits. Ring attention
sends 6bs(kv)(c-1)/c elements a layer and step (Liu et al., arXiv 2310.01889), 4bs(kv)(c-1)/c where so few stay from
forward to backward, Ulysses 4bs(h + kv)(c-1)/c^2 (Jacobs et al., arXiv 2309.14509). What is in memory while attention
runs: `test_kernel`.
"""

from __future__ import annotations

import os
import unittest.mock
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, SequenceParallelStrategy, ledger
from lightning_par.mesh.ledger import Transfer
from lightning_par.sequence import scheme
from lightning_par.sequence.part import TokensPart
from lightning_par.sharded.run_state import RunState
from tests.benchmarks.pipeline_step import GPT, Sizes
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.tensor.test_counts import KV, LAYERS, Attention, Counted, V, b, h, s

PRODUCT = {"ulysses": 2, "ring": 2}
FEW = scheme.SMALL  # bytes; not what `conftest` makes of it
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Net(Counted):
    """``kv`` features of keys, in heads of 8."""

    def __init__(self, kv: int = KV) -> None:
        super().__init__("gelu")
        for block in self.blocks:
            block.attention = Attention(kv)


class Pairs(TorchDispatchMode):
    """Counts the (query, key) pairs that the attention kernel is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is FLASH.default:
            queries, keys, causal = args[0].shape[2], args[1].shape[2], len(args) > 4 and args[4]
            self.pairs += sum(min(i + 1, keys) for i in range(queries)) if causal else queries * keys
        return func(*args, **(kwargs or {}))


@dataclass
class Books:
    """What one rank found in a step.

    Attributes:
        moved: all that was sent, from the end of the step before on.
        pairs: of queries and keys, over all layers.
        gathered: functions that gathered, in both steps, and those that the plan names.
    """

    moved: list[Transfer] = field(default_factory=list)
    pairs: int = 0
    gathered: tuple[Any, Any] = ((), ())

    @property
    def calls(self) -> Counter[tuple[str, str, str]]:
        return Counter((t.axis, t.purpose, t.verb) for t in self.moved)

    def sent(self, purpose: str) -> float:
        """Bytes, along the sequence."""
        return sum(t.sent for t in self.moved if (t.axis, t.purpose) == ("sequence", purpose))


class Watch(L.Callback):
    """Keeps books of the second window of batches."""

    def __init__(self, window: int) -> None:
        self.window, self.books = window, Books()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.window:
            self.kernels = Pairs()
            self.kernels.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.window - 1:
            self.context = ledger()
            self.opened = self.context.__enter__()
        if batch_idx == 2 * self.window - 1:
            self.kernels.__exit__(None, None, None)
            self.context.__exit__(None, None, None)
            self.books.pairs, self.books.moved = self.kernels.pairs, list(self.opened.transfers)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        planning: Any = trainer.strategy.parts.of(TokensPart)  # type: ignore[attr-defined]
        self.books.gathered = tuple(RunState.current.gathers), planning.plan.gathers


def fit(
    module: L.LightningModule, data: Any, window: int = 1, batch_size: int = b, kind: Any = SequenceParallelStrategy,
    **options: Any,
) -> Books:  # fmt: skip
    """Two steps; the books are of the second."""
    watch = Watch(window)
    trainer = L.Trainer(
        strategy=kind(**options), accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]),
        max_steps=2, accumulate_grad_batches=window, callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    return watch.books


def count(kv: int, window: int = 1, small: int = FEW, **options: Any) -> Books:
    L.seed_everything(0, verbose=False)
    with unittest.mock.patch.object(scheme, "SMALL", small):
        return fit(Net(kv), torch.randint(0, V, (4 * b * window, s)), window, **options)


SCHEMES = [("ring", 2), ("all_gather", 2), ("ulysses", 2), ("ring", 4), ("all_gather", 4), (PRODUCT, 4)]


@long()
@slow(but=["all_gather-2-fewer key heads"])
@pytest.mark.parametrize("kv", [h, KV], ids=["as many key heads", "fewer key heads"])
@pytest.mark.parametrize(("attention", "c"), SCHEMES, ids=str)
def test_attention_sends_the_fewest_bytes(attention: Any, c: int, kv: int, pool: Pool) -> None:
    u, r = (2, 2) if attention == PRODUCT else (c, 1) if attention == "ulysses" else (1, c)
    for small, rounds in ((FEW, 4), (0, 6)):
        elements = 4 * b * s * (h + kv) * (u - 1) / (u * c) + rounds * (b * s * kv / u) * (r - 1) / r
        for books in pool.run(c, count, kv, small=small, attention=attention):
            assert books.sent("attention") == LAYERS * elements * 4


@long()
def test_the_worked_example(pool: Pool) -> None:
    for attention, elements in (("ring", 12_288), ("ulysses", 20_480)):
        answers = pool.run(2, count, KV, small=0, attention=attention)
        assert {books.sent("attention") for books in answers} == {elements * 4}


@slow("4")
@pytest.mark.parametrize("c", [2, 4])
def test_a_causal_ring_gives_all_ranks_as_many_pairs_and_moves_nothing_for_it(c: int, pool: Pool) -> None:
    hops = 2 * (c - 1) * LAYERS  # keys and values there, where so few stay, and their gradients back
    for books in pool.run(c, count, h, attention="ring"):
        assert books.pairs == LAYERS * s * (s + 1) // 2 // c
        assert books.calls == {
            ("sequence", "attention", "send"): hops,
            ("sequence", "attention", "recv"): hops,
            ("sequence", "loss", "all_reduce"): 2,  # one number, forward and backward
            ("gradients", "gradients", "all_reduce"): 1,
            ("replica", "batch", "broadcast"): 2,  # its form, and its one tensor
        }
        assert [t.numel for t in books.moved if t.purpose == "loss"] == [1, 1]


def train(case: str, **options: Any) -> Books:
    model = MODELS[case]
    return fit(model.module(), model.data(0), batch_size=model.batch_size, attention="ring", **options)


@slow("gpt", "gpt_tied", "gqa_sdpa", "gqa_repeat")
@pytest.mark.parametrize("case", ["gpt", "gpt_tied", "gqa_sdpa", "gqa_repeat", "hf_llama"])
def test_nothing_gathers_in_a_language_model(case: str, pool: Pool) -> None:
    for books in pool.run(2, train, case):
        assert books.gathered == ((), ())
        assert not [t for t in books.moved if t.purpose in ("gather", "scatter")]


@long()
@slow("gqa_repeat")
@pytest.mark.parametrize("case", ["gpt", "gqa_repeat"])
def test_nothing_gathers_where_weights_are_split_too(case: str, pool: Pool) -> None:
    sizes = dict(sequence_parallel_size=2, tensor_parallel_size=2)
    for books in pool.run(4, train, case, kind=HybridParallelStrategy, **sizes):
        assert books.gathered == ((), ())
        assert not [t for t in books.moved if t.purpose in ("gather", "scatter")]


class Mixes(Net):
    """Tokens are mixed by a Fourier transform, as in FNet, which no rank can do by itself."""

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch)
        x = self.blocks[0](x) + torch.fft.fft(x, dim=1).real
        return self.head(x).square().mean()


def mix() -> Books:
    return fit(Mixes(), torch.randint(0, V, (4 * b, s)), attention="ring")


def test_what_gathers_is_counted_and_in_the_plan(pool: Pool) -> None:
    for books in pool.run(2, mix):
        (counted,), (planned,) = books.gathered
        assert counted == planned[:2] and counted[0] == "fft_fft" and "test_counts.py" in counted[1]
        assert planned[2] == 1


@long()
def test_gradients_are_summed_once_a_window_over_data_and_sequence(pool: Pool) -> None:
    size = sum(p.numel() + 1 for p in Net(KV).parameters())  # and whether there is one
    for books in pool.run(4, count, KV, window=3, sequence_parallel_size=2):
        sums = [t for t in books.moved if t.purpose == "gradients"]
        assert [(t.axis, t.verb, t.numel, t.ranks) for t in sums] == [("gradients", "all_reduce", size, 4)]
        assert {t.purpose for t in books.moved} == {"attention", "loss", "gradients", "batch"}


class Kept(L.Callback):
    """The memory that the graph of a step keeps for its backward, but for the weights; each piece once."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        weights = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}
        self.pieces: dict[int, Any] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                self.pieces[storage.data_ptr()] = storage  # alive: no other gets its address
            return x

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        self.hooks.__enter__()

    def on_before_backward(self, *args: Any) -> None:
        self.hooks.__exit__(None, None, None)
        self.nbytes = sum(storage.nbytes() for storage in self.pieces.values())
        self.pieces.clear()


SIZES = Sizes(width=256, length=4096, vocabulary=512, layers=2)


def keep(ranks: int, attention: Any) -> int:
    """Bytes on this rank."""
    kept = Kept()
    strategy: Any = SequenceParallelStrategy(attention=attention) if ranks > 1 else "auto"
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=ranks, max_steps=1, callbacks=[kept], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GPT(SIZES), DataLoader([torch.randint(0, 512, (1, SIZES.length))], batch_size=None))
    return kept.nbytes


@slow()
def test_a_rank_keeps_its_share_of_the_activations(pool: Pool) -> None:
    (alone,) = pool.run(1, keep, 1, None)
    for attention in ("ring", "all_gather"):
        assert all(nbytes <= 1.05 * alone / 2 for nbytes in pool.run(2, keep, 2, attention))
    # What attention gave is kept twice: some heads of all tokens for attention's backward, all heads of some tokens.
    again = SIZES.layers * SIZES.length * SIZES.width * 4
    assert all(nbytes <= 1.002 * (alone + again) / 2 for nbytes in pool.run(2, keep, 2, "ulysses"))
