"""What is logged, measured, shown and written: on every rank as on one device."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics.functional as tmf
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score
from torchmetrics.text import Perplexity

from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import CLASSES, Net, check, kept, loader, metrics, trainer, weights


class Logs(Net):
    """Logs with every reduction, from sharded and plain values."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        for name in ("mean", "sum", "min", "max"):
            self.log(f"fx {name}", logits.mean(), reduce_fx=name, on_step=False, on_epoch=True)
            self.log(f"synced {name}", logits.std(), reduce_fx=name, on_step=False, on_epoch=True, sync_dist=True)
        self.log("callable", logits.var(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("number", 3)
        self.log("float", float(logits.max()), on_epoch=True)
        self.log("batch size", loss, batch_size=batch_idx + 1, on_epoch=True)
        self.log("element", logits[0, 7])
        self.log("weight", self.net[0].weight.sum())
        self.log_dict({"a": logits.amin(), "b": (logits.argmax(-1) == y).double().mean()}, on_epoch=True)
        return {"loss": loss, "logits": logits, "top": logits.topk(2).values}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert all(type(value) is Tensor for value in outputs.values())
        self.log("from the end", outputs["logits"].sum())

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.log("val", self.loss(batch))
        self.log("val max", self(batch[0]).max(), reduce_fx="max", sync_dist=True)
        return self(batch[0])


def _logged() -> Any:
    module = Logs()
    t = trainer(max_epochs=2)
    t.fit(module, loader(), [loader(8, 1), loader(6, 2)])
    logged = {name: kept(value) for name, value in t.logged_metrics.items()}
    bar = {name: float(value) for name, value in t.progress_bar_metrics.items()}
    return metrics(t), logged, bar, t.validate(module, [loader(8, 1), loader(6, 2)], verbose=False)


def test_what_is_logged(pool: Pool) -> None:
    check(pool, _logged, tolerance=1e-7)  # Lightning keeps means in float32


class Measures(Net):
    """Metrics of every kind, given sharded logits."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.many = MetricCollection({"f1": MulticlassF1Score(CLASSES), "acc": MulticlassAccuracy(CLASSES, top_k=3)})
        self.val_many = self.many.clone(prefix="val/")
        self.matrix = MulticlassConfusionMatrix(CLASSES)
        self.mean, self.top, self.total = MeanMetric(), MaxMetric(), SumMetric()
        self.rows = CatMetric()
        self.perplexity = Perplexity()
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
        self.mean.update(logits)
        self.top(logits)
        self.total(logits.exp())
        self.rows(logits)
        self.perplexity(logits.unsqueeze(0), y.unsqueeze(0))
        self.held["acc"](logits.softmax(-1), y)
        self.outside[0](logits, y)
        self.log("held", self.held["acc"])
        self.log("functional", tmf.accuracy(logits, y, task="multiclass", num_classes=CLASSES))
        self.log("auroc", tmf.auroc(logits, y, task="multiclass", num_classes=CLASSES))
        self.seen.append(kept(tmf.pairwise_cosine_similarity(logits)))
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.matrix.compute())
        self.seen.append(self.rows.compute())
        self.seen.append({name: kept(value) for name, value in self.many.compute().items()})
        self.seen.append(kept(self.outside[0].compute()))
        for metric in (self.accuracy, self.matrix, self.mean, self.top, self.total, self.perplexity, self.outside[0]):
            state = {name: getattr(metric, name) for name in metric._defaults}
            assert all(type(x) is Tensor for x in state.values() if isinstance(x, Tensor)), state
            self.seen.append({name: kept(value) for name, value in state.items() if isinstance(value, Tensor)})
        self.log_dict({"mean": self.mean, "top": self.top, "total": self.total, "perplexity": self.perplexity})

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


@slow()
def test_metrics(pool: Pool) -> None:
    check(pool, _measured, tolerance=1e-6)  # torchmetrics keeps its states in float32


def _measured_over_replicas() -> Any:
    module = Measures()
    t = trainer()
    t.validate(module, loader(8, 1), verbose=False)
    return metrics(t)


def test_metrics_count_each_sample_once_over_replicas(pool: Pool) -> None:
    check(pool, _measured_over_replicas, world=4, tolerance=1e-6)


# ------------------------------------------------------------------------------------------------------------ callbacks


def _monitors(folder: str) -> Any:
    module = Net(lr=0.3)
    best = ModelCheckpoint(folder, "{epoch}-{val:.4f}", monitor="val", save_top_k=2, save_last=True)
    steps = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    stop = EarlyStopping("val", patience=1)
    timer = Timer(duration={"hours": 1})
    t = trainer([best, steps, stop, timer], enable_checkpointing=True, max_epochs=8)
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


@slow()
def test_monitors_checkpoints_and_early_stopping(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _monitors, str(tmp_path / "one"))
    ranks = pool.run(2, _monitors, str(tmp_path / "two"))
    from tests.helpers.surface import compare

    for result in ranks:
        assert not compare(one, result, 1e-7)


def _summary() -> Any:
    module = Net()
    module.net[0].requires_grad_(False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        t = trainer([RichModelSummary(max_depth=2)], enable_model_summary=True)
        t.fit(module, loader())
    table = [line.strip() for line in printed.getvalue().splitlines()]
    return table if t.is_global_zero else None


class Summary(ModelSummary):
    """Keeps the summary, which Lightning prints or logs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        summary = summarize(pl_module, max_depth=2)
        self.kept = str(summary), summary.total_parameters, summary.trainable_parameters, summary.model_size


def _summary_text() -> Any:
    module = Net()
    module.net[0].requires_grad_(False)
    callback = Summary()
    t = trainer([callback], enable_model_summary=True)
    t.fit(module, loader())
    return callback.kept


def test_the_model_summary_counts_as_on_one_device(pool: Pool) -> None:
    check(pool, _summary_text)
    (one,) = pool.run(1, _summary)
    two = pool.run(2, _summary)[0]
    wanted = [line for line in one if re.search(r"params|head|net", line)]
    assert wanted and all(line in two for line in wanted)


def _progress(kind: str) -> str:
    bar = TQDMProgressBar() if kind == "tqdm" else RichProgressBar()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        t = trainer([bar], enable_progress_bar=True)
        module = Logs()
        t.fit(module, loader(), loader(8, 1))
        t.predict(module, loader(8, 1))
    return printed.getvalue()


@slow("rich")
@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_progress_bars_show_on_rank_zero(pool: Pool, kind: str) -> None:
    one, two = pool.run(2, _progress, kind)
    assert "Epoch 0" in one and "5/5" in one
    assert "5/5" not in two


def _more_callbacks(folder: str) -> Any:
    module = Net()
    logger = CSVLogger(folder, version=0)
    t = trainer([DeviceStatsMonitor(cpu_stats=False), LearningRateMonitor()], logger=logger, log_every_n_steps=1)
    t.fit(module, loader())
    return weights(module)


def test_device_stats(pool: Pool, tmp_path: Path) -> None:
    check(pool, _more_callbacks, str(tmp_path))


class Writer(BasePredictionWriter):
    """Writes each prediction to a file of its own, and fails where it is there already."""

    def __init__(self, folder: str, interval: Any) -> None:
        super().__init__(interval)
        self.folder = Path(folder)

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        assert type(prediction) is Tensor
        for index, row in zip(indices, prediction):
            with (self.folder / f"{loader}-{index}.pt").open("xb") as file:
                torch.save(row.clone(), file)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        with (self.folder / f"epoch-{trainer.strategy.distributed_sampler_kwargs['rank']}.pt").open("xb") as file:
            torch.save((predictions, batch_indices), file)


class CallsSuper(Writer):
    """A writer that overrides the hooks themselves."""

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_predict_batch_end(*args, **kwargs)


def _write(folder: str, interval: str, give_back: bool, kind: type[Writer] = Writer) -> Any:
    Path(folder).mkdir(exist_ok=True)
    t = trainer([kind(folder, interval)])
    first = t.predict(Net(), loader(8, 1), return_predictions=give_back)
    return first, t.global_rank


@slow("*-4")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("give_back", [True, False])
@pytest.mark.parametrize("kind", [Writer, CallsSuper])
def test_each_prediction_is_written_once(
    pool: Pool, tmp_path: Path, world: int, give_back: bool, kind: type[Writer]
) -> None:
    ((one, _),) = pool.run(1, _write, str(tmp_path / "one"), "batch", True)
    results = pool.run(world, _write, str(tmp_path / "two"), "batch", give_back, kind)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()} and len(names) == 8
    for name in names:
        a, b = (torch.load(tmp_path / folder / name) for folder in ("one", "two"))
        assert torch.allclose(a, b, 0, 1e-9)
    for predictions, rank in results:
        assert (predictions is not None) == give_back
        if give_back and world == 2:
            assert torch.allclose(torch.cat(predictions), torch.cat(one), 0, 1e-9), rank


def test_predictions_are_written_at_the_end_of_the_epoch(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, _write, str(tmp_path / "two"), "epoch", True)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["epoch-0.pt", "epoch-1.pt"]
