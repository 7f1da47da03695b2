"""Where stages keep weights in parts, what user code reads of them between steps is one device's on all ranks."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import pytest
import torch

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, metrics, trainer, weights


class Reads(Net):
    """Values of views, of copies, and of what is made of them entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, *args: Any) -> None:
        first, last = self.net[0].weight, self.head.weight
        for p in self.parameters():
            self.seen += [
                p.abs().max(),
                p.detach().square().sum(),
                p.view(-1)[:3] * 2,
                p.data.cpu().flatten().sort()[0],
            ]
            self.seen += [torch.tensor(p.detach().numpy().sum()), torch.tensor(p.clone().tolist()), p.float().double()]
        self.seen += [first[:, 1:3].exp(), first.T @ first, first[:2].t() @ last[:2], first.chunk(4)[2].clone()]
        self.seen += [torch.nn.utils.parameters_to_vector(self.parameters()), last.mean() + first.std()]
        self.seen += [torch.tensor([torch.equal(first, first.clone()), torch.equal(first, first + 1)]).double()]
        whole = torch.zeros_like(first)
        whole.add_(first)  # is where that is
        self.seen.append(first.add(1).log1p().relu().norm())
        self.log("largest", sum(p.abs().max() for p in self.parameters()))


class Keeps(Reads):
    """An average of weights over steps."""

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *args: Any) -> None:
        for mean, p in zip(self.average, self.parameters(), strict=True):
            mean.mul_(0.5).add_(p.detach(), alpha=0.5)

    def on_train_end(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.parameters(), strict=True):
                p.copy_(mean)
        self.seen += [p.abs().max() for p in self.parameters()]


class Copies(Reads):
    """Deep copies are averaged, read and called, and what was saved is read once more."""

    def on_train_start(self) -> None:
        self.seen.clear()
        self.__dict__["average"] = copy.deepcopy(self)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        average = self.__dict__["average"]
        for mean, p in zip(average.parameters(), self.parameters(), strict=True):
            mean.mul_(0.5).add_(p, alpha=0.5)
        self.seen += [p.abs().max() for p in average.parameters()]
        self.seen.append(average(torch.ones(2, 6, dtype=torch.float64)))
        torch.save(self.state_dict(), file := io.BytesIO())
        file.seek(0)
        self.seen += [x.abs().sum() for x in torch.load(file).values()]
        with torch.enable_grad():
            self.seen += [p.abs().sum().detach() for p in self.parameters()]


class Changes(Reads):
    """Writes between a view and what is read of it."""

    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            row = p.detach()[0]
            p.data.mul_(0.9)
            self.seen += [row.abs().max(), p.abs().max()]


class SharesGradients(Reads):
    """What gradients were set to is kept, and follows what the clip writes into them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        given = [torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape) for p in self.parameters()]
        for n, (p, values) in enumerate(zip(self.parameters(), given, strict=True)):
            assert p.grad is not None
            if n % 2:
                p.grad = values
            else:
                p.grad.data = values
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.seen += [x.clone() for x in given]

    def on_train_batch_end(self, *args: Any) -> None: ...


class SharesData(Reads):
    """What weights were set to is kept, and moves as these are trained."""

    def on_train_start(self) -> None:
        self.given = [torch.linspace(-0.5, 0.4, p.numel(), dtype=p.dtype).reshape(p.shape) for p in self.parameters()]
        for p, values in zip(self.parameters(), self.given, strict=True):
            p.data = values

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [x.clone() for x in self.given]


class SharesVector(Reads):
    """Weights are views of one vector, which nobody keeps, and of one that is kept."""

    def on_train_batch_end(self, *args: Any) -> None:
        vector = torch.nn.utils.parameters_to_vector(self.parameters()).detach() * 0.9
        torch.nn.utils.vector_to_parameters(vector, self.parameters())
        if not self.seen:
            self.kept = vector
        self.seen.append(self.kept.clone())


class ReadsMoments(Reads):
    """What an optimizer keeps of weights, in all ways in which these are read."""

    def _states(self) -> dict[Any, Any]:
        return self.optimizers().optimizer.state  # type: ignore[union-attr, return-value]

    def on_fit_start(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, *args: Any) -> None:
        states = self._states()
        for p in self.parameters():
            mean, square, step = (states[p][key] for key in ("exp_avg", "exp_avg_sq", "step"))
            self.seen += [mean.norm(), square.detach().sqrt().sum(), mean.view(-1)[:3] * step, mean / (square + 1)]
            self.seen += [torch.tensor(mean.tolist()), (p * mean).sum().detach(), mean.cpu().flatten().sort()[0]]
        for mean in self.kept:
            mean.mul_(2)
        self.seen += [mean.abs().max() for mean in self.kept]
        self.kept = [copy.deepcopy(state["exp_avg"]) for state in states.values()]
        self.log("moments", sum(state["exp_avg"].abs().sum() for state in states.values()))


class WritesMoments(ReadsMoments):
    """And in all ways in which they are written to."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        states = self._states()
        for n, p in enumerate(self.parameters()):
            mean = states[p]["exp_avg"]
            if n % 4 == 0:
                mean.mul_(0.5)
            elif n % 4 == 1:
                states[p]["exp_avg"] = torch.full_like(p, 0.01)
            elif n % 4 == 2:
                states[p]["exp_avg"] = mean.clone() + mean
            else:
                states[p] = {**states[p], "exp_avg": mean, "exp_avg_sq": torch.ones(p.shape, dtype=p.dtype)}
            self.seen += [mean.norm(), states[p]["exp_avg"].norm()]


class Mixes(Reads):
    """Functions of weights beside gradients, as clipping by the norms of units has, and of lists of all weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            most = p.detach().abs().clamp(min=1e-3) * 0.02
            large = p.grad.abs() > most
            p.grad.copy_(torch.where(large, p.grad * (most / p.grad.abs().clamp(min=1e-6)), p.grad))
            self.seen += [torch.where(large, p.detach(), p.grad), most * p.grad]

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        own = [*self.parameters()]
        before = [p.detach().clone() for p in own]
        torch._foreach_mul_(own, 0.9)
        torch._foreach_add_(own, [0.001 * n for n in range(len(own))])
        torch._foreach_lerp_(own, before, 0.25)
        self.seen += [p.abs().sum() for p in own]


def _fit(kind: type[Reads], strategy: dict[str, Any]) -> Any:
    module = kind()
    spread = {} if int(os.environ["WORLD_SIZE"]) == 1 else {"strategy": HybridParallelStrategy(**strategy)}
    t = trainer(must_split=False, use_distributed_sampler=False, max_steps=2, **spread)
    t.fit(module, loader(12))
    seen = {str(n): x.detach().clone() for n, x in enumerate(module.seen)}
    return {"metrics": metrics(t), "seen": seen, "weights": weights(module)}


PARTS: dict[str, dict[str, Any]] = {
    "tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 2},
    "fsdp": {"pipeline_parallel_size": 2, "data_parallel": "fsdp"},
}


KINDS = [Reads, Keeps, Copies, Changes, SharesGradients, SharesData, SharesVector, ReadsMoments, WritesMoments, Mixes]


@long()
@slow(but=["tensor-WritesMoments", "fsdp-Mixes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", PARTS)
def test_what_is_read_is_one_devices(pool: Pool, parts: str, kind: type[Reads]) -> None:
    check(pool, _fit, kind, PARTS[parts], world=4)
