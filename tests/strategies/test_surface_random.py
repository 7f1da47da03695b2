"""Random draws: one device's mask on replicated tensors, streams of their own on sharded ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import CLASSES, Net, check, kept, loader, metrics, trainer, weights

REPLICATED = dict(embedding=0.3, residual=0.4)  # where activations are whole under tensor parallelism
SHARDED = dict(hidden=0.5, attention=0.3)


class Drops(Net):
    """A transformer's block with dropout in four places, its inner part under a checkpoint if asked for."""

    def __init__(self, reentrant: bool | None = None, **rates: float) -> None:
        super().__init__()
        self.rates, self.reentrant = rates, reentrant
        self.embed = nn.Linear(1, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.net = nn.Sequential(nn.LayerNorm(8))
        self.seen: list[Any] = []
        self.masks: list[Tensor] = []
        self.states: list[Any] = []

    def drop(self, x: Tensor, where: str) -> Tensor:
        return nn.functional.dropout(x, self.rates.get(where, 0.0), self.training)

    def block(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (y.view(B, T, 2, C // 2).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = self.drop((q @ k.transpose(-2, -1) / 2).softmax(-1), "attention")
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(B, T, C)), "residual")
        hidden = nn.functional.gelu(self.up(x))
        dropped = self.drop(hidden, "hidden")
        if isinstance(dropped, ShardedTensor):
            self.masks.append((dropped.local == 0).detach())
        return x + self.drop(self.down(dropped), "residual")

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x.unsqueeze(-1)), "embedding")
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(self.net(x.mean(1)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(kept(outputs["loss"]))
        self.states.append((torch.get_rng_state().clone(), np.random.get_state()[1].sum(), random.getstate()))

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(float(torch.stack([grad.norm() for grad in grads]).norm()))


def _train(reentrant: bool | None = None, epochs: int = 2, **rates: float) -> Any:
    seed_everything(11)
    module = Drops(reentrant, **rates)
    t = trainer(max_epochs=epochs)
    t.fit(module, loader(12), loader(4, 1))
    return module.seen, metrics(t), weights(module), torch.rand(2)


def test_dropout_of_replicated_tensors_is_one_devices(pool: Pool) -> None:
    check(pool, _train, **REPLICATED)


@slow(but=["True"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_of_replicated_tensors_under_a_checkpoint(pool: Pool, reentrant: bool) -> None:
    check(pool, _train, reentrant, **REPLICATED)


def _watched(reentrant: bool | None, **rates: float) -> Any:
    seed_everything(11)
    module = Drops(reentrant, **rates)
    t = trainer(max_epochs=2)
    t.fit(module, loader(12))
    return module.seen, weights(module), module.masks, module.states


@long()
@slow(but=["True"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_dropout_of_sharded_tensors(pool: Pool, reentrant: bool | None) -> None:
    a, b = pool.run(2, _watched, reentrant, **REPLICATED, **SHARDED)
    again, _ = pool.run(2, _watched, reentrant, **REPLICATED, **SHARDED)
    (one,) = pool.run(1, _watched, None, **REPLICATED, **SHARDED)
    # It repeats bitwise, and all ranks hold the same.
    assert a[0] == again[0] == b[0]
    for name, weight in a[1].items():
        assert torch.equal(weight, again[1][name]) and torch.equal(weight, b[1][name]), name
    # Generators are equal on the ranks of a replica after each step.
    for mine, theirs in zip(a[3], b[3], strict=True):
        assert torch.equal(mine[0], theirs[0]) and mine[1:] == theirs[1:]
    assert one[0] != a[0]  # or else nothing sharded was dropped
    # Masks differ between shards, layers and steps; recomputed, they are the same again.
    masks = a[2]
    assert all(not torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))
    kinds = {tuple(mask.flatten().tolist()) for mask in masks}
    steps, layers = 6, 2
    assert len(kinds) == steps * layers
    assert len(masks) == steps * layers * (1 if reentrant is None else 2)
    share = torch.cat([mask.flatten() for mask in a[2]]).double().mean()
    assert abs(share - SHARDED["hidden"]) < 0.03


@long()
def test_sharded_draws_do_not_move_the_shared_generator(pool: Pool) -> None:
    only_replicated = pool.run(2, _watched, None, **REPLICATED)[0]
    both = pool.run(2, _watched, None, **REPLICATED, **SHARDED)[0]
    for mine, theirs in zip(only_replicated[3], both[3], strict=True):
        assert torch.equal(mine[0], theirs[0])


@long()
@slow("True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_forwards_masks_again(pool: Pool, reentrant: bool) -> None:
    """Losses and gradients as without a checkpoint, from the same seed."""
    plain, _ = pool.run(2, _train, None, 1, **REPLICATED, **SHARDED)
    checked, _ = pool.run(2, _train, reentrant, 1, **REPLICATED, **SHARDED)
    assert all(abs(float(x) - float(y)) < 1e-12 for x, y in zip(plain[0], checked[0], strict=True))
    for name, weight in plain[2].items():
        assert torch.allclose(weight, checked[2][name], 0, 1e-12), name


def _replicas() -> Any:
    seed_everything(11)
    module = Drops(**SHARDED)
    t = trainer(max_epochs=1)
    t.fit(module, loader(16))
    return module.masks, module.states


def test_replicas_draw_masks_of_their_own(pool: Pool) -> None:
    ranks = pool.run(4, _replicas)
    first = [masks[0] for masks, _ in ranks]
    assert all(not torch.equal(first[i], first[j]) for i in range(4) for j in range(i))
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(x[0], y[0]) for x, y in zip(ranks[a][1], ranks[b][1], strict=True))


class DrawsOutside(Net):
    """Draws for sharded tensors where no step runs: one device's values."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
                p.mul_(torch.bernoulli(torch.full_like(p, 0.9)))
                p.grad.add_(torch.rand_like(p.grad))

    def on_train_epoch_end(self) -> None:
        hidden = self.net[:2](torch.ones(2, 6, dtype=torch.float64))
        self.log("outside", nn.functional.dropout(hidden, 0.5).sum())


def _outside() -> Any:
    seed_everything(3)
    module = DrawsOutside()
    t = trainer(max_epochs=2)
    t.fit(module, loader(12))
    return weights(module), metrics(t), torch.rand(2)


def test_draws_outside_a_step_are_one_devices(pool: Pool) -> None:
    check(pool, _outside)


class Sampled(Net):
    """Draws in an evaluation step: monte-carlo dropout, and samples from sharded logits."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        hidden = nn.functional.dropout(self.net[:2](batch[0]), 0.5)
        tokens = torch.multinomial(logits.softmax(-1), 2)
        return tokens, (logits / 0.7).argmax(-1), hidden.mean(), torch.distributions.Categorical(logits=logits).sample()


def _sampled() -> Any:
    seed_everything(3)
    return trainer().predict(Sampled(), loader(12))


def test_samples_of_logits_are_one_devices(pool: Pool) -> None:
    (one,) = pool.run(1, _sampled)
    a, b = pool.run(2, _sampled)
    again, _ = pool.run(2, _sampled)
    assert all(torch.equal(x, y) for p, q in zip(a, again) for x, y in zip(p, q))
    assert all(torch.equal(x, y) for p, q in zip(a, b) for x, y in zip(p, q))
    assert CLASSES > int(one[0][0].max())
    for p, q in zip(one, a):
        assert all(type(y) is Tensor for y in q)
        assert torch.equal(p[1], q[1])
