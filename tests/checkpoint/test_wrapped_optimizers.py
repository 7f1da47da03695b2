"""The file has the state of optimizers that an optimizer wraps, of all stages, and what objects in a state hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.differences import differences
from tests.helpers.pool import Pool
from tests.helpers.slow import long


class Wraps(Optimizer):
    """Keeps the other one's state dict within its own, as Lookahead of `pytorch_optimizer` does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, "others": [{"inner": self.inner.state_dict()}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["others"][0]["inner"])


class Graft:
    def __init__(self, p: Tensor) -> None:
        self.momentum = [torch.zeros_like(p)]


class OneByOne(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            self.update(p, self.state[p])
        return loss

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Grafts(OneByOne):
    """Keeps tensors in objects, as ScalableShampoo of `pytorch_optimizer` does."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        graft = state.setdefault("graft", Graft(p))
        graft.momentum[0].mul_(0.9).add_(p.grad)
        p.sub_(0.1 * graft.momentum[0])


class Shifts(OneByOne):
    """Steps by what gradients were, of which a deque keeps the last ones, as AdaShift of `pytorch_optimizer` does."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        assert p.grad is not None
        past = state.setdefault("past", deque(maxlen=2))
        past.append(p.grad.clone())
        p.sub_(0.1 * past[0] / (1 + past[-1].abs()))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "wraps": lambda parameters: Wraps(torch.optim.Adam(parameters, lr=0.01)),
    "grafts": Grafts,
    "shifts": Shifts,
}


class Net(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def _saved(path: Path, layout: dict[str, Any] | None, resume: Path | None, optimizer: str) -> None:
    devices: Any = {"devices": 1} if layout is None else {"devices": 2, "strategy": HybridParallelStrategy(**layout)}
    torch.manual_seed(0)
    module = Net(optimizer)
    trainer = Trainer(
        accelerator="cpu", precision="64-true", max_epochs=1 if resume is None else 2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **devices,
    )  # fmt: skip
    batches = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)  # which else loads no deque
    trainer.save_checkpoint(path)


@long("pipeline-wraps", "pipeline-shifts")
@pytest.mark.parametrize("optimizer", ["wraps", "shifts"])
@pytest.mark.parametrize(
    "layout", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["pipeline", "tensor"]
)
def test_the_state_of_wrapped_optimizers_and_what_deques_hold_is_saved_and_loaded(
    pool: Pool, layout: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    for name, resume in (("first", None), ("second", tmp_path / "first.ckpt")):
        one, other = tmp_path / f"{name}_one.ckpt", tmp_path / f"{name}.ckpt"
        pool.run(1, _saved, one, None, resume, optimizer)
        pool.run(2, _saved, other, layout, resume, optimizer)
        files = [torch.load(path, weights_only=False) for path in (one, other)]
        for part in ("state_dict", "optimizer_states"):
            assert not differences(files[0][part], files[1][part], 1e-9)


def test_what_objects_in_an_optimizers_state_hold_in_parts_is_saved_whole(pool: Pool, tmp_path: Path) -> None:
    """The first rank asked for the others' parts alone, until a time limit."""
    pool.run(1, _saved, tmp_path / "one.ckpt", None, None, "grafts")
    pool.run(2, _saved, tmp_path / "two.ckpt", {"tensor_parallel_size": 2}, None, "grafts")
    held = []
    for name in ("one", "two"):
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)["optimizer_states"][0]["state"]
        held.append({number: of["graft"].momentum for number, of in state.items()})
    assert not differences(*held, 1e-9)
