"""A fit with ``strategy="tensor_parallel"`` by an installed package: `make package` runs it away from the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(**devices: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(64, 8).double(), torch.randint(2, (64,))), batch_size=16)
    module = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **devices,
    )
    trainer.fit(module, data)
    return module.state_dict()


if __name__ == "__main__":
    one = trained(devices=1)
    two = trained(devices=2, strategy="tensor_parallel")
    assert all(torch.allclose(two[name], x, rtol=0, atol=1e-12) for name, x in one.items())
    home = Path(sys.modules["lightning_par"].__file__ or "")
    assert "site-packages" in home.parts, f"{home} is not what was installed"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        version = importlib.metadata.version("lightning_par")
        print(f"lightning_par {version} in {home.parent}: two processes as one device.")
