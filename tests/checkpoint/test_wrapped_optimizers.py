"""The file has the state of optimizers that an optimizer wraps, of all stages."""

from __future__ import annotations

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


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return Wraps(torch.optim.Adam(self.parameters(), lr=0.01))


def _saved(path: Path, layout: dict[str, Any] | None, resume: Path | None) -> None:
    devices: Any = {"devices": 1} if layout is None else {"devices": 2, "strategy": HybridParallelStrategy(**layout)}
    torch.manual_seed(0)
    module = Net()
    trainer = Trainer(
        accelerator="cpu", precision="64-true", max_epochs=1 if resume is None else 2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **devices,
    )  # fmt: skip
    batches = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=resume)  # type: ignore[arg-type]
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    "layout", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["pipeline", "tensor"]
)
def test_the_state_of_wrapped_optimizers_is_saved_and_loaded(
    pool: Pool, layout: dict[str, Any], tmp_path: Path
) -> None:
    for name, resume in (("first", None), ("second", tmp_path / "first.ckpt")):
        one, other = tmp_path / f"{name}_one.ckpt", tmp_path / f"{name}.ckpt"
        pool.run(1, _saved, one, None, resume)
        pool.run(2, _saved, other, layout, resume)
        files = [torch.load(path, weights_only=False) for path in (one, other)]
        for part in ("state_dict", "optimizer_states"):
            assert not differences(files[0][part], files[1][part], 1e-9)
