"""Under a pipeline, what a step logs, measures, prints and stores is seen on every rank as on one device."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics.functional as tmf
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import CLASSES, Net, check, compare, kept, loader, metrics, weights


class Logs(Net):
    """Logs in every way, stores, prints."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.by_name: dict[str, list[float]] = {"val": []}
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        for name in ("mean", "sum", "min", "max"):
            self.log(f"fx {name}", logits.mean(), reduce_fx=name, on_step=False, on_epoch=True)
        self.log("callable", logits.abs().mean(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("number", 3)
        self.log("float", float(loss), on_epoch=True)
        self.log("item", loss.item() * 2)
        self.log("batch size", loss, batch_size=batch_idx + 1, on_epoch=True)
        self.log_dict({"a": logits.sum(), "b": (logits.argmax(-1) == y).double().mean()}, on_epoch=True)
        self.outputs.append(loss.detach())
        self.print(f"step {batch_idx}: {loss.item():.6f}")
        if batch_idx == 1:
            print("once", float(logits.max()))
        return {"loss": loss, "logits": logits, "rows": x.sum(1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from the end", outputs["logits"].sum())
        self.seen.append({name: kept(value) for name, value in outputs.items()})

    def on_train_epoch_end(self) -> None:
        self.log("stacked", torch.stack(self.outputs).mean())
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor | None:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("val", loss, prog_bar=True)
        self.log("both loaders", logits.std(), add_dataloader_idx=dataloader_idx == 1)
        self.by_name["val"].append(loss.item())
        return None if batch_idx else logits

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(kept(outputs))

    def on_validation_epoch_end(self) -> None:
        self.log("val list", sum(self.by_name["val"]))

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        self.log("auroc", tmf.auroc(logits[:, 0], (batch[1] > CLASSES // 2).long(), task="binary"))
        return {"logits": logits, "idx": batch_idx, "name": "test"}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log_nothing = logits.sum()
        return logits.argmax(-1), {"top": logits.topk(2).values}


def _logged() -> Any:
    module = Logs()
    printed = io.StringIO()
    t = trainer(max_epochs=2, num_sanity_val_steps=1, enable_progress_bar=True, callbacks=[RichProgressBar()])
    with contextlib.redirect_stdout(printed):
        t.fit(module, loader(10), [loader(8, 1), loader(4, 2)])
    logged = {name: kept(value) for name, value in t.logged_metrics.items()}
    bar = {name: float(value) for name, value in t.progress_bar_metrics.items()}
    text = printed.getvalue()
    lines = [line.strip() for line in text.splitlines() if line.startswith(("step", "once"))]
    fit = metrics(t), logged, bar, module.seen, module.by_name, weights(module)
    rest = t.validate(module, [loader(8, 1), loader(4, 2)], verbose=False), t.test(module, loader(8, 1), verbose=False)
    return {"fit": fit, "rest": rest, "predicted": t.predict(module, loader(8, 1))}, lines


def _what_is_logged() -> Any:
    return _logged()[0]


@long()
def test_what_is_logged(pool: Pool) -> None:
    check(pool, _what_is_logged, tolerance=1e-7)  # Lightning keeps means in float32


class Board(Logger):
    """A logger whose experiment keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    name, version = "board", 0  # type: ignore[assignment]

    @property
    def experiment(self) -> Any:
        return self

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.given.append((name, kept(value), step))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Says(Net):
    """Speaks to loggers of Lightning's and of Python's, and to the standard output, of values of every stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch[0])
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1])
        assert isinstance(self.logger, Board) and self.logger.name == "board"
        self.logger.experiment.add_scalar("hidden", hidden.detach().abs().mean(), batch_idx)
        self.loggers[1].experiment.add_scalar("loss", loss.detach(), self.global_step)
        logging.getLogger("said").warning("loss %.6f", loss.item())
        sys.stdout.write(f"said {hidden.abs().sum().item():.6f}\n")
        return loss


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name} {record.getMessage()} {record.funcName}")


def _said(microbatches: Any) -> Any:
    heard, printed, boards = Heard(), io.StringIO(), [Board(), Board()]
    logging.getLogger("said").addHandler(heard)
    t = trainer(microbatches=microbatches, max_epochs=1, logger=boards)
    with contextlib.redirect_stdout(printed):
        t.fit(Says(), loader())
    logging.getLogger("said").removeHandler(heard)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("said")]
    return [board.given for board in boards], heard.lines, lines


@long()
@slow("1")
@pytest.mark.parametrize("microbatches", ["auto", 1])
def test_what_is_said_is_said_once(pool: Pool, microbatches: Any) -> None:
    (one,) = pool.run(1, _said, microbatches)
    first, second = pool.run(2, _said, microbatches)
    assert all(len(x) == len(one[1]) > 2 for x in (*one[0], *one[1:]))
    assert not compare(one[0], first[0], 1e-9) and one[1:] == first[1:]
    assert second == ([[], []], [], [])


class Measures(Net):
    """Metrics passed to log, updated and computed later, in collections, containers and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.many = MetricCollection({"f1": MulticlassF1Score(CLASSES), "acc": MulticlassAccuracy(CLASSES, top_k=3)})
        self.val_many = self.many.clone(prefix="val/")
        self.matrix = MulticlassConfusionMatrix(CLASSES)
        self.mean = MeanMetric()
        self.held = nn.ModuleDict({"acc": MulticlassAccuracy(CLASSES)})
        self.outside = [MulticlassAccuracy(CLASSES)]  # no submodule
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.seen.append(kept(self.accuracy(logits, y)))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.many(logits, y))
        self.matrix.update(logits, y)
        self.mean(loss)
        self.held["acc"](logits.softmax(-1), y)
        self.outside[0](logits, y)
        self.log("held", self.held["acc"], on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.matrix.compute())
        self.seen.append({name: kept(value) for name, value in self.many.compute().items()})
        self.seen.append(kept(self.outside[0].compute()))
        for metric in (self.accuracy, self.matrix, self.mean, self.outside[0]):
            self.seen.append({name: kept(getattr(metric, name)) for name in metric._defaults})
        self.log("mean", self.mean)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_many.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_many.compute())
        self.val_many.reset()


def _measured() -> Any:
    module = Measures()
    t = trainer(max_epochs=2, num_sanity_val_steps=1)
    t.fit(module, loader(), loader(8, 1))
    return module.seen, metrics(t), weights(module)


@long()
def test_metrics(pool: Pool) -> None:
    check(pool, _measured, tolerance=1e-6)  # torchmetrics keeps its states in float32


# ------------------------------------------------------------------------------------------------------------ callbacks


def _monitors(folder: str) -> Any:
    module = Net(lr=0.3)
    best = ModelCheckpoint(folder, "{epoch}-{val:.4f}", monitor="val", save_top_k=2, save_last=True)
    steps = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    stop = EarlyStopping("val", patience=1)
    timer = Timer(duration={"hours": 1})
    logger = CSVLogger(folder, version=0)
    rates = LearningRateMonitor("step")
    callbacks = [best, steps, stop, timer, rates]
    t = trainer(callbacks, enable_checkpointing=True, max_epochs=8, logger=logger, log_every_n_steps=2)
    t.fit(module, loader(), loader(8, 1))
    results = t.test(module, loader(8, 2), ckpt_path="best", verbose=False)
    return {
        "epoch": t.current_epoch,
        "stopped": stop.stopped_epoch,
        "best": Path(best.best_model_path).name,
        "score": best.best_model_score,
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "test": results,
        "weights": weights(module),
        "timed": timer.time_elapsed("train") > 0,
    }


@long()
def test_monitors_checkpoints_and_early_stopping(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _monitors, str(tmp_path / "one"))
    for result in pool.run(2, _monitors, str(tmp_path / "two")):
        assert not compare(one, result, 1e-7)
    tables = [(tmp_path / folder / "lightning_logs/version_0/metrics.csv").read_text() for folder in ("one", "two")]
    assert tables[0].splitlines()[0] == tables[1].splitlines()[0] and len(tables[0]) > 100


class Summary(RichModelSummary):
    """Keeps the summary, which Lightning prints on one rank."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        summary = summarize(pl_module, max_depth=2)
        self.kept = str(summary), summary.total_parameters, summary.trainable_parameters, summary.model_size
        super().on_fit_start(trainer, pl_module)


def _summary() -> Any:
    module = Net()
    module.net[0].requires_grad_(False)
    callback = Summary(max_depth=2)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        t = trainer([callback], enable_model_summary=True)
        t.fit(module, loader(8))
    lines = [line.strip() for line in printed.getvalue().splitlines() if re.search("params|head|net", line)]
    return callback.kept, lines if t.is_global_zero else [], weights(module)


def test_the_model_summary_counts_the_whole_model_on_every_rank(pool: Pool) -> None:
    (one,) = pool.run(1, _summary)
    results = pool.run(2, _summary)
    assert one[0] == results[0][0] == results[1][0] and not compare(one[2], results[1][2])
    assert one[1] and set(one[1]) <= set(results[0][1])  # the start-up table names modules, too


class Writer(BasePredictionWriter):
    """Writes each prediction to a file of its own, and fails where it is there already."""

    def __init__(self, folder: str) -> None:
        super().__init__("batch_and_epoch")
        self.folder = Path(folder)

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        for index, row in zip(indices, prediction):
            with (self.folder / f"{loader}-{index}.pt").open("xb") as file:
                torch.save(row.clone(), file)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        replica = getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"]
        with (self.folder / f"epoch-{replica}.pt").open("xb") as file:
            torch.save((predictions, batch_indices), file)


def _write(folder: str, give_back: bool) -> Any:
    Path(folder).mkdir(exist_ok=True)
    t = trainer([Writer(folder)])
    return t.predict(Net(), loader(10, 1), return_predictions=give_back)


@long()
def test_each_prediction_is_written_once_and_given_to_every_rank(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _write, str(tmp_path / "one"), True)
    for world in (2, 4):
        folder = tmp_path / f"{world}"
        results = pool.run(world, _write, str(folder), world == 2)
        assert all(not compare(one, result) for result in results) if world == 2 else results == [None] * world
        names = {path.name for path in (tmp_path / "one").iterdir()}
        assert {path.name for path in folder.iterdir()} - {"epoch-1.pt"} == names
        for name in names - {"epoch-0.pt"}:
            assert torch.allclose(torch.load(tmp_path / "one" / name), torch.load(folder / name), 0, 1e-9)
