"""Dropout along the sequence repeats bitwise, differs from shard to shard, and leaves all generators alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

P = 0.4


class Seen(NamedTuple):
    losses: list[Tensor]
    masks: list[Tensor]  # this rank's part of what residual dropout keeps
    attended: list[Tensor]  # and of attention that shows the weights it keeps
    states: list[Tensor]  # of the shared generator, after each step
    weights: dict[str, Tensor]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)
        self.drop = nn.Dropout(P)
        self.seen = Seen([], [], [], [], {})

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.drop(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=P).transpose(1, 2).flatten(-2)
        )
        mask = self.drop(torch.ones_like(x.detach()))
        # Equal weights of values that are unit vectors: what comes out is what was kept.
        tokens = torch.eye(ids.shape[1], dtype=x.dtype).expand(len(ids), 2, -1, -1)
        kept = F.scaled_dot_product_attention(torch.zeros_like(q.detach()), tokens[..., :4], tokens, dropout_p=P)
        loss = F.cross_entropy(self.head(x * mask)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert isinstance(mask, ShardedTensor) and isinstance(kept, ShardedTensor)
        self.seen.masks.append(mask.local.clone())
        self.seen.attended.append(kept.local.clone())
        self.seen.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.states.append(torch.get_rng_state())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _train(seed: int, attention: str) -> Seen:
    torch.manual_seed(seed)
    module = Net()
    trainer = Trainer(
        strategy=SequenceParallelStrategy(attention=attention), accelerator="cpu", devices=2, max_epochs=1,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    ids = torch.randint(16, (6, 2, 10), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(ids, batch_size=None))  # type: ignore[arg-type]
    return module.seen._replace(weights={name: x.detach().clone() for name, x in module.state_dict().items()})


def _runs(attention: str) -> list[Seen]:
    return [_train(seed, attention) for seed in (3, 3, 4)]


def _flat(seen: Seen) -> list[Tensor]:
    return [*seen.losses, *seen.masks, *seen.attended, *seen.states, *seen.weights.values()]


@long()
@slow("ulysses", "all_gather")
@pytest.mark.parametrize("attention", ["ring", "all_gather", "ulysses"])
def test_dropout_repeats_and_differs_between_shards(attention: str, pool: Pool) -> None:
    ranks = pool.run(2, _runs, attention)
    for once, again, other in ranks:
        assert all(torch.equal(x, y) for x, y in zip(_flat(once), _flat(again), strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(once.masks, other.masks))
        for drawn in (once.masks, once.attended):  # a mask of its own each step
            assert not any(torch.equal(x, y) for x, y in zip(drawn, drawn[1:]))
    one, two = ranks[0][0], ranks[1][0]
    assert all(torch.equal(x, y) for x, y in zip(one.states, two.states, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(one.losses, two.losses, strict=True))
    assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)
    for mine, theirs in (*zip(one.masks, two.masks), *zip(one.attended, two.attended)):
        assert mine.shape == theirs.shape and not torch.equal(mine, theirs)
        kept = torch.cat([mine, theirs]) > 0
        assert 0.4 < kept.double().mean() < 0.8
