"""A step's side effects: undone without a trace, or told and applied as if the step had run plainly."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_par.mesh.axis import Axis
from lightning_par.pipeline.effects.console import Hearing, say
from lightning_par.pipeline.effects.effects import Effects, apply
from lightning_par.pipeline.effects.logged_outputs import OutputRecorder
from lightning_par.pipeline.effects.merged_effects import merged
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.python_state.changes import SequenceChange
from tests.helpers.pool import Pool, RanksFailedError


class Meter:
    """A plain object that counts."""

    def __init__(self) -> None:
        self.total = 0.0
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class Encoder(nn.Module):
    """A container whose buffer and attributes its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale.mul_(0.9).add_(0.1 * x.abs().mean())
        return self.layer(x / self.scale)


class Busy(pl.LightningModule):
    """Has every kind of side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.acc = MulticlassAccuracy(3, average="none")
        self.mean, self.sum, self.cat = MeanMetric(), SumMetric(), CatMetric()
        self.both = MetricCollection({"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)})
        self.outputs: list[Any] = []
        self.nested: dict[str, Any] = {"a": {"b": []}, "old": 1, "total": torch.zeros(())}
        self.seen: set[int] = set()
        self.last: deque[Any] = deque(maxlen=2)
        self.counts: Counter[str] = Counter(a=1)
        self.meter = Meter()
        self.histogram = np.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.step = 0
        self.gone: int | None = 1
        self.plain = torch.zeros(2)
        self.register_buffer("queue", torch.zeros(4, 3))
        self.register_buffer("newest", None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.encoder(x)
        loss = nn.functional.cross_entropy(logits, y)
        if self.gone is not None:
            del self.gone
            self.gone = None
        self.step += 1
        self.noise = torch.rand(2, generator=self.generator)
        self.outputs.append(loss)
        self.nested["a"]["b"].append(batch_idx)
        self.nested.pop("old", None)
        self.nested["total"] += loss.detach()
        self.nested.setdefault("new", []).append(loss.detach())
        self.seen.add(batch_idx)
        self.last.append(loss.detach())
        self.counts["a"] += 1
        self.meter.update(float(loss.detach()))
        self.histogram[batch_idx % 3] += 1
        self.plain += 1
        self.queue[batch_idx % 4] = logits[0].detach()
        self.newest = logits.detach()
        per_class = self.acc(logits, y)
        self.mean.update(loss)
        self.sum(loss)
        self.cat.update(logits)
        self.both.update(logits, y)
        print("builtin", batch_idx)
        self.print("module", batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", self.sum, on_step=True, on_epoch=True)
        self.log_dict({f"class_{i}": value for i, value in enumerate(per_class)}, on_epoch=True)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _watch(module: nn.Module) -> Watch:
    return Watch(module, [(name, m) for name, m in module.named_modules() if name != "encoder.layer"])


def _batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g)


def _flat(value: Any) -> Any:
    """A comparable copy."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return {key: _flat(x) for key, x in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_flat(x) for x in value]
    return _flat(vars(value)) if isinstance(value, Meter) else value


def _state(module: nn.Module) -> Any:
    skipped = {"_modules", "_parameters", "_update_signature", "update", "compute", "_trainer", "_metric_attributes"}
    return {
        name: {key: _flat(x) for key, x in vars(m).items() if key not in skipped} for name, m in module.named_modules()
    }


def _ready(steps: int = 2) -> Busy:
    torch.manual_seed(0)
    module = Busy()
    module.print = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for i in range(steps):
        module.training_step(_batch(i), i)
    del module.print, module.log
    return module


@pytest.mark.parametrize("steps", [0, 2])
def test_undone_leaves_no_trace(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    module = _ready(steps)
    watch, before = _watch(module), _state(module)
    objects = [module.outputs, module.nested["a"], module.queue, module.encoder.scale, module.sum.sum_value]
    versions = [x._version for x in objects[2:]]
    capsys.readouterr()
    for _ in range(2):
        with watch.undone():
            loss = module.training_step(_batch(5), 5)
            assert module.step == steps + 1
        loss.backward()  # of a graph that holds the buffer as the run changed it
    assert _state(module) == before
    now = [module.outputs, module.nested["a"], module.queue, module.encoder.scale, module.sum.sum_value]
    assert all(a is b for a, b in zip(objects, now)) and versions == [x._version for x in objects[2:]]
    assert capsys.readouterr().out == ""


def test_old_tensors_are_let_go() -> None:
    module = pl.LightningModule()
    watch = _watch(module)
    module.register_buffer("latest", torch.zeros(2))
    old = weakref.ref(module.latest)
    for _ in range(3):
        with watch.undone():
            pass
        module.latest = torch.ones(2)
    assert old() is None


def test_undone_after_an_exception() -> None:
    module = _ready()
    watch, before = _watch(module), _state(module)
    with pytest.raises(KeyboardInterrupt), watch.undone():
        module.training_step(_batch(5), 5)
        raise KeyboardInterrupt
    assert _state(module) == before
    assert print is __builtins__["print"]  # type: ignore[index]


def test_told_and_applied_is_a_plain_run() -> None:
    module, plain = _ready(), _ready()
    watch = _watch(module)
    outputs, queue, before = module.outputs, module.queue, _state(module)
    for i in range(2, 5):
        with watch.told() as effects:
            effects.result = module.training_step(_batch(i), i)
        if i == 2:
            assert _state(module) == before
        logged = {r.name for r in effects.logs}
        assert logged == {"loss", "sum", "class_0", "class_1", "class_2", "acc", "f1"}
        assert [p.text for p in effects.said] == [f"builtin {i}\n", f"module {i}\n"]
        effects.logs.clear()
        effects.said.clear()
        apply(effects, module, watch, None, show=True)
        plain.log = plain.print = lambda *args, **kwargs: None  # type: ignore[method-assign]
        plain.training_step(_batch(i), i)
        del plain.log, plain.print
    assert _state(module) == _state(plain)
    assert module.outputs is outputs and module.queue is queue
    assert module.both.compute_groups == plain.both.compute_groups == {0: ["acc", "f1"]}
    assert torch.equal(module.cat.compute(), plain.cat.compute())


def _fit(module: pl.LightningModule, folder: Path) -> dict[str, float]:
    x, y = zip(*(_batch(i) for i in range(4)))
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=6))
    return {key: value.item() for key, value in trainer.callback_metrics.items()}


class Retold(Busy):
    """Its step is run for nothing, told and applied."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        watch = _watch(self)
        with watch.undone():
            super().training_step(batch, batch_idx)
        with watch.told() as effects:
            effects.result = super().training_step(batch, batch_idx)
        apply(effects, self, watch, None, show=True)
        return effects.result


def test_replayed_logs_are_those_of_a_plain_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    metrics = []
    for kind in (Busy, Retold):
        pl.seed_everything(0)
        metrics.append(_fit(kind(), tmp_path))
        said.append([line for line in capsys.readouterr().out.splitlines() if line[:7] in ("builtin", "module ")])
    assert metrics[0] == metrics[1] and {"loss_step", "sum_epoch", "class_2", "f1"} <= metrics[0].keys()
    assert said[0] == said[1] and len(said[0]) == 16


def _axis() -> Axis:
    dist.init_process_group("gloo")
    return Axis("pipeline", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def _travelled() -> tuple[Any, Any, bool]:
    axis = _axis()
    module = _ready()
    watch, outputs = _watch(module), module.outputs
    effects = Effects()
    if axis.rank == 1:
        with watch.told() as effects:
            effects.result = {"loss": module.training_step(_batch(3), 3), "prediction": torch.arange(100_000)}
    effects = effects.travel(axis, source=1)
    assert not effects.result["loss"].requires_grad and effects.result["prediction"].sum() == 4999950000
    assert [r.name for r in effects.logs][:2] == ["loss", "sum"]
    effects.logs.clear()
    apply(effects, module, watch, None, show=False)
    return _state(module), module.step, module.outputs is outputs


def test_effects_travel_to_all_ranks(pool: Pool) -> None:
    first, last = pool.run(2, _travelled)
    assert first == last and first[1] == 3 and first[2]


def _unsendable() -> None:
    axis = _axis()
    module = _ready()
    watch, effects = _watch(module), Effects()
    if axis.rank == 1:
        with watch.told() as effects:
            module.step = 7
            module.encoder.callback = lambda: 0
    effects.travel(axis, source=1)


def test_what_cannot_travel_is_refused_on_every_rank(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        pool.run(2, _unsendable)
    reports = caught.value.reports
    assert len(reports) == 2
    assert all("TypeError: self.encoder.callback can't be sent" in text for text in reports.values())
    assert all("self.step" not in text for text in reports.values())


def test_changes_that_have_no_copy_are_named() -> None:
    module = pl.LightningModule()
    module.cache = torch.zeros(300, 300)
    module.many = [torch.zeros(2) for _ in range(100)]
    watch = _watch(module)
    with pytest.raises(RuntimeError, match=r"in place of which its runs have no copies: self.cache, self.many\[3\]"):
        with watch.undone():
            module.cache += 1
            module.many[3] += 1
    with watch.told() as effects:
        module.cache += 1
        module.head = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"assigns modules or parameters: self.head.*self.cache"):
        effects.travel(Axis("pipeline", (0,), 0, None), source=0)
    assert not hasattr(module, "head")


def test_a_loss_made_of_a_metric_is_refused() -> None:
    module = pl.LightningModule()
    module.mse = MeanSquaredError()
    x = torch.ones(3, requires_grad=True)
    with _watch(module).undone():
        loss = module.mse(x, torch.zeros(3))
    assert module.mse._update_count == 0
    with pytest.raises(RuntimeError, match="made of the value of a metric, MeanSquaredError"):
        loss.backward()


def test_metrics_are_called_through_the_hook() -> None:
    module = pl.LightningModule()
    module.acc = MulticlassAccuracy(3)
    calls = []

    def around(name: str, metric: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        calls.append(name)
        return call(*args, **kwargs)

    watch = Watch(module, list(module.named_modules()), around)
    x, y = _batch(0)
    for run in (watch.undone, watch.told):
        with run():
            value = module.acc(x[:, :3], y)
    assert calls == ["self.acc.forward"] * 2
    assert value == copy.deepcopy(module.acc)(x[:, :3], y)


def test_what_was_there_before_is_itself_after_microbatches() -> None:
    record, tensor = {"n": 0}, torch.zeros(2)
    names = {id(record): "self.a[0]", id(tensor): "self.x"}
    parts = [Effects(state={"self.b": SequenceChange(0, None, [record, tensor, {}])}, names=names) for _ in range(2)]
    rest = merged(parts, torch.cat).state["self.b"].rest
    assert rest[0] is record and rest[1] is tensor


def test_microbatches_are_merged() -> None:
    module = _ready()
    watch, parts = _watch(module), []
    for x in (torch.ones(2), torch.zeros(1)):
        with watch.told() as effects:
            module.outputs.append({"x": x, "n": len(x)})
            module.log("x", x.sum())
            print("both")
            if len(x) == 2:
                print("one alone")
            effects.result = (x, "name")
        parts.append(effects)
    whole = merged(parts, lambda xs: torch.cat([x.reshape(-1) for x in xs]))
    assert whole.result[0].tolist() == [1, 1, 0] and whole.result[1] == "name"
    assert whole.logs[0].value.tolist() == [2, 0]
    assert [said.text for said in whole.said] == ["both\n", "one alone\n"]  # type: ignore[union-attr]
    whole.logs.clear()
    apply(whole, module, watch, None, show=False)
    assert module.outputs[-1]["x"].tolist() == [1, 1, 0] and module.outputs[-1]["n"] == 1


def test_what_the_step_redirects_it_has_itself(capsys: pytest.CaptureFixture[str]) -> None:
    said = list[Any]()
    with Hearing(said.append):
        with contextlib.redirect_stdout(io.StringIO()) as redirected:
            print("inner")
        print("outer")
    assert redirected.getvalue() == "inner\n" and [one.text for one in said] == ["outer\n"]
    assert capsys.readouterr() == ("", "")


def test_text_goes_where_the_step_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As it does on one device."""
    module = pl.LightningModule()
    module.print = print  # type: ignore[method-assign]  # as without a progress bar
    file, said = io.StringIO(), list[Any]()
    with Hearing(said.append):
        recorder = OutputRecorder(module, [], said, dict)
        recorder.print("out", end="")
        recorder.print("error", file=sys.stderr)
        recorder.print("kept", file=file)
    assert capsys.readouterr() == ("", "") and file.getvalue() == "kept\n"
    for one in said:
        say(one, module)
    assert capsys.readouterr() == ("out", "error\n")
