"""What moves along the tensor axis in a step, counted: the known minimum (Megatron-LM, arXiv 1909.08053), no more.

b sequences of s tokens, h features, L layers, V words, t ranks; an all-reduce of N elements sends 2N(t-1)/t.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import TensorParallelStrategy, ledger
from lightning_par.sequence.part import TokensPart
from lightning_par.sharded.tensor import leaf
from lightning_par.tensor.part import TensorPart
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

b, s, h, KV, LAYERS, FFN, V = 2, 32, 64, 16, 4, 172, 96  # a small worked example; 4 query heads share one key head


class Attention(nn.Module):
    def __init__(self, kv: int) -> None:
        super().__init__()
        self.kv = kv
        self.q, self.o = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.k, self.v = nn.Linear(h, kv, bias=False), nn.Linear(h, kv, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q = self.q(x).view(B, T, -1, 8).transpose(1, 2)
        k, v = (f(x).view(B, T, -1, 8).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(h, FFN), nn.Linear(h, FFN), nn.Linear(FFN, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, mlp: str) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(h), Attention(KV)
        self.norm2 = nn.RMSNorm(h)
        self.mlp = SwiGLU() if mlp == "swiglu" else nn.Sequential(nn.Linear(h, FFN), nn.GELU(), nn.Linear(FFN, h))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Counted(L.LightningModule):
    def __init__(self, mlp: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(s, h)
        self.blocks = nn.ModuleList([Block(mlp) for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(h), nn.Linear(h, V, bias=False)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.tokens(batch) + self.positions(torch.arange(s))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Books(L.Callback):
    """Opens a ledger for the second step."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.context = ledger()
        self.moved = self.context.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.held = sum(getattr(p, "local", p).numel() for p in pl_module.parameters())
        self.states = sum(leaf(x).numel() for state in optimizer.state.values() for x in state.values() if x.ndim)
        self.plan = trainer.strategy.parts.of(TensorPart).plan
        self.residual = trainer.strategy.parts.of(TokensPart)


def count(mlp: str, clip: float | None = None, shard_residual: bool = False) -> tuple[Any, ...]:
    L.seed_everything(0, verbose=False)
    books = Books()
    trainer = L.Trainer(
        strategy=TensorParallelStrategy(shard_residual=shard_residual), accelerator="cpu", devices=2, max_steps=2,
        logger=False, callbacks=[books],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=clip,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.randint(0, V, (4, s)), batch_size=b)
    trainer.fit(Counted(mlp), data)
    in_order = books.residual is None or books.residual.axis.spread(s).in_order(2)
    return books.moved, books.held, books.states, books.plan, in_order


@slow("swiglu")
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_four_all_reduces_a_layer_and_their_bytes(pool: Pool, mlp: str) -> None:
    moved = pool.run(2, count, mlp)[0][0]
    calls = Counter((t.purpose, t.verb, t.numel) for t in moved.transfers if t.axis == "tensor")
    assert calls == {
        ("leave", "all_reduce", b * s * h): 2 * LAYERS + 1,  # forward: two a layer, and the embedding's
        ("enter", "all_reduce", b * s * h): 2 * LAYERS + 1,  # backward: two a layer, and the head's
        ("loss", "all_reduce", b * s): 3,  # the largest logit, the sum of exponentials, the target's logit
    }
    assert moved.sent(axis="tensor", purpose="enter") + moved.sent(axis="tensor", purpose="leave") == 73_728 * 4
    assert moved.sent(axis="tensor", purpose="loss") == 192 * 4


@slow("gelu")
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_a_sharded_residual_stream_moves_as_many_bytes_in_gathers_and_scatters(pool: Pool, mlp: str) -> None:
    moved, *_, in_order = pool.run(2, count, mlp, None, True)[0]
    assert in_order  # what is gathered, or summed, lies as it came
    on_axis = [t for t in moved.transfers if t.axis == "tensor"]
    assert Counter((t.verb, t.numel) for t in on_axis if t.purpose in ("enter", "leave")) == {
        ("all_gather", b * s * h): 4 * LAYERS + 2,  # two a layer each way; the head's, and the embedding's backward
        ("reduce_scatter", b * s * h): 4 * LAYERS + 2,  # the embedding's, and the head's backward
    }
    assert moved.sent(axis="tensor", purpose="enter") + moved.sent(axis="tensor", purpose="leave") == 73_728 * 4
    assert {(t.verb, t.numel) for t in on_axis if t.purpose not in ("enter", "leave")} <= {
        ("all_reduce", b * s),  # the loss
        ("all_reduce", 1),  # its mean
    }
    # The gradients of what every rank holds are shares: one sum, and the flags of what got any with it.
    assert [t.purpose for t in moved.transfers if t.axis == "stage"] == ["gradients"]


def test_clipping_costs_one_all_reduce_of_one_number(pool: Pool) -> None:
    moved = pool.run(2, count, "gelu", 0.1)[0][0]
    assert [t.numel for t in moved.select(purpose="clip")] == [1]


def test_a_rank_holds_its_part_and_what_the_plan_names_as_whole(pool: Pool) -> None:
    results = pool.run(2, count, "swiglu")
    module = Counted("swiglu")
    for rank, (_, held, states, plan, _) in enumerate(results):
        whole = {name for names, _, _ in plan.whole for name in names}
        expected = sum(p.numel() if name in whole else p.numel() // 2 for name, p in module.named_parameters())
        assert held == expected == plan.numel(rank)
        assert states == 2 * expected
        vectors = {
            name for name, p in module.named_parameters() if p.ndim == 1 and not name.endswith(("gate.bias", "up.bias"))
        }
        assert whole == vectors | {"positions.weight"}
