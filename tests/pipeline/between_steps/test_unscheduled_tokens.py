"""Steps without a schedule, of models of tokens, which a tensor axis shares out between islands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, trained
from tests.pipeline.between_steps.test_unscheduled import ByHand


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.qkv(self.norm(x)).split(c, 2))
        ahead = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        y = (q @ k.mT / 2).masked_fill(ahead, -torch.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.wide(x))))


class Tokens(Net):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        del self.net, self.head
        self.table, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.double()

    def embed(self, x: Tensor) -> Tensor:
        return self.table(x) + self.places[: x.shape[1]]

    def trunk(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(x)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class TokensByHand(ByHand, Tokens):
    """Twice a step."""


class TokensPenalized(Tokens):
    """A penalty on gradients by embeddings, as adversarial training has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.embed(batch[:, :-1]).detach().requires_grad_()
        loss = F.cross_entropy(self.head(self.trunk(h)).flatten(0, 1), batch[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, h, create_graph=True)
        return self.loss(batch) + gradient.square().sum()


class TokensWeighed(TokensByHand):
    """Weights themselves, and gradients of some."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        some = [self.norm.weight, self.head.weight, self.blocks[0].up.weight, self.places]
        gradients = torch.autograd.grad(loss, some, retain_graph=True)
        self.log("gradients", torch.stack([g.norm() for g in gradients]).sum())
        return loss + 1e-2 * sum(p.square().sum() for p in self.blocks[0].parameters())


class TokensBranch(Tokens):
    """Goes by a value of an early layer."""

    def trunk(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
            if h.sum() > 0:
                h = h * 0.9
        return self.norm(h)


class TokensKept(TokensByHand):
    """The loss goes by what hooks keep, which is tokens' own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.norm.register_forward_hook(lambda layer, given, made: self.kept.append(made))

    def loss_by_hand(self, batch: Any) -> Tensor:
        self.kept.clear()
        loss = self.loss(batch)
        return loss + sum(h.square().mean() for h in self.kept)


MODULES: dict[str, Callable[[], Net]] = {
    kind.__name__: kind for kind in (Tokens, TokensByHand, TokensPenalized, TokensWeighed, TokensBranch, TokensKept)
}
LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "residual": (
        4,
        partial(HybridParallelStrategy, pipeline_parallel_size=2, tensor_parallel_size=2, shard_residual=True),
    ),
    "sequence": (4, partial(HybridParallelStrategy, pipeline_parallel_size=2, sequence_parallel_size=2)),
    "tensor": (4, partial(HybridParallelStrategy, pipeline_parallel_size=2, tensor_parallel_size=2)),
}


def _fit(kind: str, layout: str) -> Any:
    texts = torch.randint(11, (12, 7), generator=torch.Generator().manual_seed(1))
    return trained(MODULES[kind](), DataLoader(texts, 4), LAYOUTS[layout][1], max_epochs=2)


CELLS = [f"{kind}-{layout}" for layout in LAYOUTS for kind in MODULES]


@long()
@slow(but=["TokensByHand-residual"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_of_tokens_without_a_schedule_is_one_devices(cell: str, pool: Pool) -> None:
    kind, layout = cell.split("-")
    check(pool, _fit, kind, layout, world=LAYOUTS[layout][0])
