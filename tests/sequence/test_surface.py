"""What a user sees along the sequence is one device's: logged values, metrics, printed numbers, predictions."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from lightning_par import SequenceParallelStrategy
from lightning_par.verdict.compare import compare_tensors, flat
from tests.helpers.pool import Pool
from tests.helpers.slow import long
from tests.sequence.test_input import Mix

V = 16


class Net(LightningModule):
    """Attention, a norm by statistics over the tokens, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(V, 8), Mix(), nn.BatchNorm1d(8)
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, V)
        self.accuracy, self.val_accuracy, self.mean = MulticlassAccuracy(V), MulticlassAccuracy(V), MeanMetric()
        self.perplexity = Perplexity()
        self.seen: list[Any] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.mix(self.embed(ids)).transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(x)[0])

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, targets = self(ids[:, :-1]), ids[:, 1:]
        return logits, targets, F.cross_entropy(logits.transpose(1, 2), targets)

    def training_step(self, ids: Tensor, batch_idx: int) -> dict[str, Tensor]:
        logits, targets, loss = self.losses(ids)
        self.accuracy(logits.flatten(0, 1), targets.flatten())
        self.mean.update(logits.detach().abs().mean(-1))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("std", logits.detach().std(), on_epoch=True)
        self.log("length", float(ids.shape[1]), on_step=False, on_epoch=True)
        self.seen += [loss.item(), f"{loss:.6f}", logits[:, -1].argmax(-1).tolist()]
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        assert type(outputs["logits"]) is Tensor
        self.seen.append(outputs["logits"].sum().item())

    def validation_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        logits, targets, loss = self.losses(ids)
        self.val_accuracy.update(logits.flatten(0, 1), targets.flatten())
        self.perplexity.update(logits, targets)
        self.log_dict({"val_accuracy": self.val_accuracy, "perplexity": self.perplexity, "val_loss": loss})
        return logits

    def test_step(self, ids: Tensor, batch_idx: int) -> None:
        logits, _, loss = self.losses(ids)
        self.log_dict({"test_loss": loss, "largest": logits.max()}, batch_size=len(ids))

    def predict_step(self, ids: Tensor, batch_idx: int) -> Any:
        logits = self(ids)
        assert type(logits[0].detach().clone().numpy().sum().item()) is float
        return logits, [logits[:, 0], logits.argmax(-1)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _loader() -> Any:
    """Batches of other lengths, down to a single token, and a ragged last one."""
    generator = torch.Generator().manual_seed(2)
    sizes = ((4, 9), (4, 3), (2, 2), (4, 12), (1, 7))
    return DataLoader([torch.randint(V, size, generator=generator) for size in sizes], batch_size=None)  # type: ignore


def _whole_run() -> dict[str, Any]:
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=SequenceParallelStrategy() if world > 1 else "auto", max_epochs=2,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, _loader(), _loader())
    fitted = {name: x.detach().clone() for name, x in trainer.callback_metrics.items()}
    return {
        "fit": fitted,
        "validated": trainer.validate(module, _loader(), verbose=False),
        "tested": trainer.test(module, _loader(), verbose=False),
        "predicted": trainer.predict(module, _loader()),
        "seen": module.seen,
        "weights": {name: x.detach().clone() for name, x in module.state_dict().items()},
    }


def _tensors(result: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is compared up to rounding, and what is compared as it is."""
    values = flat(result)
    numbers = {name: torch.as_tensor(x) for name, x in values.items() if isinstance(x, (Tensor, float))}
    return numbers, {name: x for name, x in values.items() if name not in numbers}


@long()
def test_a_whole_run_is_one_devices(pool: Pool) -> None:
    expected, others = _tensors(pool.run(1, _whole_run)[0])
    for result in pool.run(2, _whole_run):
        numbers, rest = _tensors(result)
        assert rest == others and len(others) >= 20
        assert compare_tensors("value", expected, numbers, 1e-9) == []
        assert all(type(x) is Tensor for x in flat(result["predicted"]).values())
