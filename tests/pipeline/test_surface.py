"""Under a pipeline, everything a Lightning user does around a step does what it does on one device."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers import surface
from tests.helpers.accelerator import device_type
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import CLASSES, Net, Points, check, compare, kept, loader, metrics, weights


class Watched(Net):
    """Keeps what a user's hooks would see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(kept(loss))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(kept(outputs["loss"]))
        self.seen.append([group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups])


# ------------------------------------------------------------------------------------------------- ways to train


class Scheduled(Watched):
    """Several parameter groups, one of them frozen, and a scheduler."""

    def __init__(self, kind: str = "step") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        self.net[2].bias.requires_grad_(False)
        groups = [
            {"params": self.net[0].parameters(), "lr": 0.01},
            {"params": self.net[2].parameters(), "weight_decay": 0.1},
            {"params": [*self.net[3].parameters(), *self.head.parameters()], "momentum": 0.5},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if self.kind == "step":
            return [optimizer], [{"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.3, 15), "interval": "step"}]
        if self.kind == "epoch":
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.3)]
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.kind}}


def _options(kind: str | None = None, **kwargs: Any) -> Any:
    module = Watched() if kind is None else Scheduled(kind)
    t = trainer(**{"max_epochs": 2, **kwargs})
    t.fit(module, loader(18), loader(8, 1))
    return module.seen, metrics(t), weights(module), t.global_step, t.current_epoch


OPTIONS: dict[str, dict[str, Any]] = {
    "short window, clip by norm, step": dict(kind="step", accumulate_grad_batches=3, gradient_clip_val=0.1),
    "clip by value, epoch": dict(kind="epoch", gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "plateau, sanity": dict(kind="val", max_epochs=3, num_sanity_val_steps=2, val_check_interval=2),
    "fast dev run": dict(fast_dev_run=2),
    "limits": dict(limit_train_batches=0.6, limit_val_batches=1, max_epochs=-1, max_steps=5),
    "overfit, anomaly": dict(overfit_batches=2, detect_anomaly=True),
    "profiler, reload": dict(profiler="simple", reload_dataloaders_every_n_epochs=1, inference_mode=False),
    "more microbatches than samples": dict(microbatches=64, schedule="zbv"),
}


@long()
@slow(but=["profiler, reload"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_trainer(pool: Pool, option: str) -> None:
    check(pool, _options, **OPTIONS[option])


class Normalized(Net):
    """A hook on what a layer made goes by how large the gradient of a sample is."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        if h.requires_grad:
            h.register_hook(lambda g: g / (0.01 + g.norm(dim=1, keepdim=True)))
        return self.head(h)


def _accumulated() -> Any:
    module = Normalized()
    t = trainer(accumulate_grad_batches=3, microbatches=1)
    t.fit(module, loader(16))
    return weights(module), metrics(t)


@long()
def test_hooks_meet_gradients_of_the_loss_that_is_divided_by_the_batches_of_a_window(pool: Pool) -> None:
    check(pool, _accumulated)


class Finetuned(Watched):
    @property
    def backbone(self) -> nn.Module:
        return self.net

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.8))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def _callback(kind: str) -> Any:
    callbacks: dict[str, Any] = {
        "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
        "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
        "ema": Ema,
        "finetuning": lambda: BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2, verbose=False),
    }
    module = Finetuned() if kind == "finetuning" else Watched()
    t = trainer([callbacks[kind]()], max_epochs=2 if kind == "ema" else 4)
    t.fit(module, loader(), loader(8, 1))
    return module.seen, metrics(t), weights(module), t.global_step


@long()
@slow(but=["ema"])
@pytest.mark.parametrize("kind", ["accumulation", "swa", "ema", "finetuning"])
def test_callbacks_that_train_otherwise(pool: Pool, kind: str) -> None:
    check(pool, _callback, kind)


class CountsSteps(Net):
    """A step that looks at its optimizer, which is made with the number of steps, for which data is loaded."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), int(self.trainer.estimated_stepping_batches)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _counts_steps() -> Any:
    module, t = CountsSteps(), trainer(max_epochs=2)
    t.fit(module, loader())
    return metrics(t), weights(module), torch.rand(3)


def test_a_trial_that_asks_for_the_number_of_steps_draws_nothing(pool: Pool) -> None:
    check(pool, _counts_steps)


class LooksAtAnother(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(self.look)

    def look(self, p: Tensor) -> None:
        if self.head.weight.grad is not None:
            p.grad.mul_(2)  # type: ignore[union-attr]


def _looks_at_another() -> None:
    trainer().fit(LooksAtAnother(), loader())


def test_a_hook_within_backward_sees_no_gradient_of_another_stage(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="looks at the gradient of 'head.weight', which is on another stage"):
        pool.run(2, _looks_at_another, until=0)


class Low(Net):
    """SGD: AdamW would magnify the rounding of a gradient that is nearly zero."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Inf(torch.autograd.Function):
    """Makes one entry of its input's gradient infinite, at the third step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: bool) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        if ctx.bad:
            grad[0, 0] = float("inf")
        return grad, None


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return Inf.apply(x, self.calls == 3)


class Overflows(Low):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Bad())


def _scaled(overflows: bool) -> Any:
    scaler = torch.amp.GradScaler(device_type(), init_scale=1024.0, growth_interval=2)
    module = (Overflows if overflows else Low)()
    precision = MixedPrecision("16-mixed", device=device_type(), scaler=scaler)
    t = trainer(plugins=[precision], gradient_clip_val=0.5, microbatches=1)
    t.fit(module, loader(dtype=torch.float32))
    return scaler.get_scale(), t.global_step, weights(module)


@slow("False")
@pytest.mark.parametrize("overflows", [False, True])
def test_a_gradient_scaler_skips_the_same_steps_on_all_stages(pool: Pool, overflows: bool) -> None:
    results = check(pool, _scaled, overflows, tolerance=1e-2)
    assert results[0][0] == results[1][0] and (results[0][0] < 4096.0) == overflows


def _precision(precision: str) -> Any:
    module = Low()
    t = trainer(precision=precision)
    t.fit(module, loader(dtype=torch.float32))
    return weights(module)


@slow(but=["32-true"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_precisions_keep_their_dtypes(pool: Pool, precision: str) -> None:
    check(pool, _precision, precision, tolerance=1e-4 if precision == "32-true" else 0.1)


class Frozen(Watched):
    """A stage without any gradient, then one again; a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.requires_grad_(batch_idx in (1, 3))
        self.head.requires_grad_(batch_idx != 3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.unused.weight.grad is None


def _frozen() -> Any:
    module = Frozen()
    t = trainer()
    t.fit(module, loader(16))
    return module.seen, weights(module)


@long()
def test_stages_are_frozen_and_unfrozen_while_training(pool: Pool) -> None:
    check(pool, _frozen)


def _lr_find() -> Any:
    module = Net()
    t = trainer(max_epochs=3)
    found = Tuner(t).lr_find(module, loader(), min_lr=1e-4, max_lr=1.0, num_training=12, early_stop_threshold=None)
    assert found is not None
    t.fit(module, loader())
    return found.results, found.suggestion(), module.lr, weights(module)


@slow()
def test_lr_find(pool: Pool) -> None:
    check(pool, _lr_find)


class Sized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(40, batch_size=self.batch_size)


def _scale_batch_size() -> Any:
    module = Sized()
    Tuner(trainer(max_epochs=1)).scale_batch_size(module, max_trials=2, steps_per_trial=1)


def test_the_batch_size_finder_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="batch size"):
        pool.run(2, _scale_batch_size)


# ------------------------------------------------------------------------------------------------------- batches


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    name: str = "pair"


class Batches(Dataset[Any]):
    """Batches of one kind, of sizes that differ."""

    def __init__(self, kind: str, sizes: tuple[int, ...] = (4, 4, 3, 1)) -> None:
        self.kind, self.sizes = kind, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        points = Points(40, seed=index)
        n = self.sizes[index]
        x, y = points.x[:n], points.y[:n]
        if self.kind == "dict":
            return {"x": x, "y": y, "ids": [f"id{i}" for i in range(n)], "step": index}
        if self.kind == "dataclass":
            return Pair(x, y)
        if self.kind == "encoding":
            from transformers import BatchEncoding

            return BatchEncoding({"x": x, "y": y})
        if self.kind == "nested":
            return {"in": [(x[:, :3], "left"), (x[:, 3:], "right")], "out": {"y": y, "w": torch.ones(n).double()}}
        return x, y


def _parts(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Pair):
        return batch.x, batch.y
    if isinstance(batch, (tuple, list)):
        return batch[0], batch[1]
    if "in" in batch:
        x = torch.cat([part for part, _ in batch["in"]], 1)
        return x * batch["out"]["w"].unsqueeze(1), batch["out"]["y"]
    return batch["x"], batch["y"]


class Takes(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(_parts(batch))
        self.log("train", loss, batch_size=len(_parts(batch)[0]), on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([kept(outputs["loss"]), kept(_parts(batch)[0])])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(_parts(batch)), batch_size=len(_parts(batch)[0]))
        return batch


def _batches() -> Any:
    found = {}
    for kind in ("tuple", "dict", "dataclass", "encoding", "nested"):
        module = Takes()
        structured = Batches(kind) if kind == "tuple" else Batches(kind, (4, 3))
        data = DataLoader(structured, batch_size=None)
        t = trainer()
        t.fit(module, data, data)
        found[kind] = module.seen, metrics(t), weights(module)
    return found


def test_batches_of_any_structure_and_size(pool: Pool) -> None:
    check(pool, _batches)


class Numbers(IterableDataset[Any]):
    """Batches without a tensor."""

    def __iter__(self) -> Any:
        return iter([{"rows": [[0.1 * i] * 6, [0.2] * 6], "names": ["a", "b"]} for i in range(3)])


class NoTensors(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(torch.tensor(batch["rows"], device=self.device))
        sizes = torch.tensor([len(name) for name in batch["names"]], device=self.device)
        return nn.functional.cross_entropy(logits, sizes)


def _no_tensors() -> Any:
    module = NoTensors()
    t = trainer(microbatches="auto")
    t.fit(module, DataLoader(Numbers(), batch_size=None))
    return module.seen, weights(module)


def test_batches_without_tensors(pool: Pool) -> None:
    check(pool, _no_tensors)


class Combined(Watched):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total = self.loss(batch["a"])
        if batch["b"] is not None:
            total = total + 0.5 * self.loss(batch["b"])
        self.log("train", total, batch_size=4)
        return total


def _combined() -> Any:
    module = Combined()
    loaders = CombinedLoader({"a": loader(18), "b": loader(8, 1)}, "max_size")
    t = trainer(max_epochs=2, must_spread=False)  # each stage calls every module, on another part of the batch
    t.fit(module, loaders)
    return module.seen, metrics(t), weights(module)


@slow()
def test_a_combined_loader_whose_shorter_part_ends(pool: Pool) -> None:
    check(pool, _combined)


class Text(Watched):
    """A new sequence length at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(CLASSES, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        mask = tokens.ne(0)
        logits = self(self.tok(tokens[:, :-1]))
        positions = torch.arange(tokens.shape[1] - 1, device=self.device).unsqueeze(0)
        logits = logits + 0.01 * positions.unsqueeze(-1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        self.log("tokens", mask.sum().double())
        return loss


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, CLASSES, (4 - index // 2, 4 + index), generator=generator)
        tokens[0, 3:] = 0
        return tokens, [f"id {index}"]


def _text() -> Any:
    module = Text()
    t = trainer(max_epochs=2)
    t.fit(module, DataLoader(Sentences(), batch_size=None))
    return module.seen, metrics(t), weights(module)


@slow()
def test_a_new_sequence_length_at_each_step(pool: Pool) -> None:
    check(pool, _text)


# -------------------------------------------------------------------------------------------------- control flow


class Branches(Watched):
    """Does something else by the step, the batch's index, its loader and its values; returns early; in-place state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros((), dtype=torch.float64))
        self.history = torch.zeros(8, dtype=torch.float64)
        self.best = float("inf")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if x[0, 0] > 0:
            x = x * 2
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        if batch_idx % 2:
            loss = loss + logits.pow(2).mean()
            self.log("odd", loss)
        if self.global_step % 3 == 0:
            self.log("third", logits.sum())
        if self.current_epoch == 1:
            return {"loss": loss, "logits": logits.detach(), "idx": batch_idx, "x": x}
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = outputs if isinstance(outputs, dict) else {}
        self.seen.append({name: kept(value) for name, value in found.items()})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if loss < self.best:
            self.best = loss.item()
            self.log("best", self.best)
        if dataloader_idx == 1:
            return None
        self.ema.mul_(0.9).add_(loss, alpha=0.1)
        self.history[batch_idx] = loss
        self.log("second" if batch_idx else "first", loss)
        return {"loss": loss, "rows": logits}


def _branches() -> Any:
    module = Branches()
    t = trainer(max_epochs=2)
    t.fit(module, loader(), [loader(8, 1), loader(4, 2)])
    return module.seen, metrics(t), weights(module), module.history, module.best


@long()
def test_steps_that_branch(pool: Pool) -> None:
    check(pool, _branches)


class CopiesTrainer(Callback):
    """As one does that keeps the state of all callbacks: a progress bar leads to the trainer."""

    def __init__(self) -> None:
        self.batches = 0
        self.copies: list[tuple[int, int]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        copied = copy.deepcopy(trainer)
        assert copied.lightning_module is not trainer.lightning_module
        self.copies.append((copied.global_step, next(c for c in copied.callbacks if isinstance(c, type(self))).batches))
        self.batches += 1


def _copied_trainer(make: Any) -> Any:
    module, callback = Watched(), CopiesTrainer()
    t = make([callback], max_epochs=1)
    t.fit(module, loader())
    torch.save(t, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return callback.copies, metrics(t), weights(module), loaded.global_step, weights(loaded.lightning_module)


@slow("tensor")
@pytest.mark.parametrize("make", [trainer, surface.trainer], ids=["pipeline", "tensor"])
def test_a_trainer_is_copied_within_a_run(pool: Pool, make: Any) -> None:
    check(pool, _copied_trainer, make)


def _no_validation() -> Any:
    module, t = Watched(), trainer(max_epochs=1)
    module.validation_step = None  # Lightning takes it as a module that has none
    t.fit(module, loader(), loader(8, 1))
    return metrics(t), weights(module)


def test_a_step_that_is_set_to_none(pool: Pool) -> None:
    check(pool, _no_validation)


class Twice(Watched):
    """Evaluates the model twice a step, in another order than it trains; values are logged before the last module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch[0])
        aux = hidden.pow(2).mean()
        self.log("aux", aux)
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1]) + aux
        self.log("train", loss)
        self.log("item", loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net(batch[0])
        self.log("hidden", hidden.pow(2).mean())
        self.log("val", nn.functional.cross_entropy(self.head(hidden), batch[1]))
        self.log("again", self(batch[0] * 2).max())


def _twice() -> Any:
    module = Twice()
    t = trainer(schedule="zbv", microbatches=3)
    t.fit(module, loader(), loader(8, 1))
    return module.seen, metrics(t), weights(module)


@long()
def test_an_evaluation_may_go_through_the_model_again(pool: Pool) -> None:
    check(pool, _twice)


class Scalars(Text):
    """Numbers, crops and rates that are others at each step."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        alpha = min(1.0, 0.1 * (1 + self.global_step))
        if "alpha" in self.trainer.callback_metrics:
            self.log("alpha before", self.trainer.callback_metrics["alpha"])
        tokens = batch[0][:, : 4 + (self.global_step + random.randint(0, 1)) % 3]
        logits = self(self.tok(tokens[:, :-1])) * alpha
        beta = torch.tensor(alpha * 2, dtype=torch.float64)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        loss = loss + beta * logits.pow(2).mean()
        self.log_dict({"alpha": alpha, "beta": beta, "lr": self.optimizers().param_groups[0]["lr"]})
        self.log("gathered", self.all_gather(loss.detach()).mean())
        return {"loss": loss, "norm": self.head.weight.norm()}


class SameSentences(Sentences):
    def __getitem__(self, index: int) -> Any:
        return torch.randint(1, CLASSES, (4, 9), generator=torch.Generator().manual_seed(index)), "no ids"


def _scalars() -> Any:
    module = Scalars()
    t = trainer()
    t.fit(module, DataLoader(SameSentences(), batch_size=None))
    return module.seen, metrics(t), weights(module)


@long()
def test_numbers_and_crops_of_each_step(pool: Pool) -> None:
    check(pool, _scalars)


# --------------------------------------------------------------------------------------------------------- hooks


class Hooks(Watched):
    """Hooks of the module, of tensors and of units; an optimizer step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.fired: list[Any] = []
        self.features: dict[str, list[Tensor]] = {"net.1": [], "net.2": []}

    def setup(self, stage: str) -> None:
        for name, p in self.named_parameters():
            p.register_hook(lambda grad, name=name: self._note(name, grad))
        self.net[0].register_forward_pre_hook(lambda *args: print("a unit prints"))
        for name, stored in self.features.items():
            self.get_submodule(name).register_forward_hook(lambda *args, stored=stored: stored.append(args[2].detach()))

    def _note(self, name: str, grad: Tensor) -> Tensor:
        self.fired.append((name, grad.clone()))
        return grad * 0.5

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.order.append("zero")

    def on_before_backward(self, loss: Tensor) -> None:
        self.order.append("before")
        self.seen.append(kept(loss))

    def on_after_backward(self) -> None:
        self.order.append("after")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.order.append("backward")
        (loss * 0.5).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.order.append("step")
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (self.global_step + 1)
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.order.append("scheduler")
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]


def _hooked() -> Any:
    module = Hooks()
    t = trainer(max_epochs=2, accumulate_grad_batches=2, schedule="zbv", microbatches="auto")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        t.fit(module, loader(18))
    fired: dict[str, list[Tensor]] = {}
    for name, grad in module.fired:
        fired.setdefault(name, []).append(grad)
    features = {name: torch.cat(stored) for name, stored in module.features.items() if stored}
    lines = printed.getvalue().count("a unit prints")
    return {"all": (module.order, module.seen, weights(module)), "fired": fired, "features": features, "lines": lines}


@long()
def test_hooks_fire_once_a_step_with_whole_gradients_where_the_weights_are(pool: Pool) -> None:
    (one,) = pool.run(1, _hooked)
    two = pool.run(2, _hooked)
    for result in two:
        assert not compare(one["all"], result["all"])
        assert result["fired"] and not compare(one["features"], result["features"])
        assert all(not compare(one["fired"][name], mine) for name, mine in result["fired"].items())
    assert one["lines"] == sum(result["lines"] for result in two) == 10
    assert {name for result in two for name in result["fired"]} == set(one["fired"])


class Handles(Callback):
    """Handles the module in the middle of a fit as users do."""

    def __init__(self) -> None:
        self.copied: Any = None
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before = list(pl_module.parameters())
        self.outputs.append(kept(outputs["loss"]))
        if batch_idx == 0:
            pl_module.cpu()
            pl_module.to(trainer.strategy.root_device).double()
        elif batch_idx == 1:
            self.copied = copy.deepcopy(pl_module)
            assert len(pl_module.state_dict()) == len(self.copied.state_dict())
        elif batch_idx == 2:
            pl_module.apply(lambda m: nn.init.constant_(m.bias, 0.1) if isinstance(m, nn.Linear) else None)
        elif batch_idx == 3:
            pl_module.requires_grad_(False).requires_grad_(True)
            pl_module.eval().train()
        assert all(a is b for a, b in zip(before, pl_module.parameters(), strict=True))


def _handled() -> Any:
    module = Net()
    callback = Handles()
    t = trainer([callback], max_epochs=2)
    t.fit(module, loader())
    return weights(module), metrics(t), weights(callback.copied), callback.outputs


def test_a_module_is_moved_copied_and_written_in_the_middle_of_a_fit(pool: Pool) -> None:
    check(pool, _handled)


# ----------------------------------------------------------------------------------------------------- sequences


def _in_sequence() -> Any:
    module = Net()
    objects = dict(module.named_parameters())
    seen: dict[str, Any] = {"first": trainer().predict(module, loader(8, 2))}
    t = trainer(max_epochs=1)
    seen["validate before"] = t.validate(module, loader(8, 1), verbose=False)
    t.fit(module, loader(), loader(8, 1))
    seen["fit"] = metrics(t), weights(module)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    seen["plain call"] = module(x).detach()
    seen["test"] = t.test(module, loader(8, 2), verbose=False)
    seen["predict"] = t.predict(module, [loader(8, 2)])
    t.fit_loop.max_epochs = 2
    t.fit(module, loader(), loader(8, 1))
    seen["second fit"] = metrics(t), weights(module), t.global_step
    other = trainer(max_epochs=1, schedule="interleaved_1f1b", microbatches=4)
    other.fit(module, loader())
    seen["other trainer"] = weights(module), other.global_step
    split = surface.trainer(max_epochs=1)
    split.fit(module, loader())
    seen["another axis"] = weights(module), metrics(split)
    assert all(p is objects[name] for name, p in module.named_parameters())
    return seen


@slow()
def test_entry_points_in_sequence(pool: Pool) -> None:
    check(pool, _in_sequence)


class Fails(Net):
    """Raises in one unit, on the rank that runs it."""

    def __init__(self, place: int, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error
        self.calls = 0
        (self.net[0] if place == 0 else self.head).register_forward_pre_hook(self._maybe)

    def _maybe(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise self.error("on purpose")


def _fails(place: int, error: type[BaseException]) -> Any:
    module = Fails(place, error)
    try:
        trainer(timeout=timedelta(minutes=30), microbatches="auto").fit(module, loader())
    except BaseException as caught:
        return type(caught).__name__, str(caught), "".join(traceback.format_exception(caught))
    return "nothing", "", ""


@slow("0")
@pytest.mark.parametrize("place", [0, 1])
def test_an_exception_in_one_unit_ends_all_ranks_long_before_the_timeout(pool: Pool, place: int) -> None:
    for error, name, said in ((ValueError, "ValueError", "on purpose"), (KeyboardInterrupt, "SystemExit", "1")):
        results = pool.run(2, _fails, place, error)
        assert results[place][:2] == (name, said) and "on purpose" in results[place][2]
        assert results[1 - place][0] == "RuntimeError" and f"pipeline rank {place} failed" in results[1 - place][1]


class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("on purpose")


def _stopped(folder: str) -> Any:
    module = Net().double()  # the average is made in its precision before the Trainer's is applied
    t = trainer([OnExceptionCheckpoint(folder), Ema(), Stops()], enable_checkpointing=True)
    with contextlib.suppress(ValueError):
        t.fit(module, loader())
    written = torch.load(Path(folder) / "on_exception.ckpt", weights_only=False)
    resumed = trainer([Ema()], max_epochs=2)
    resumed.fit(module, loader(), ckpt_path=f"{folder}/on_exception.ckpt")
    states = {name: written[name] for name in ("state_dict", "current_model_state", "optimizer_states")}
    return states, weights(module), resumed.global_step


def _not_stopped() -> Any:
    module, t = Net().double(), trainer([Ema()], max_epochs=2)
    t.fit(module, loader())
    return weights(module), t.global_step


class TiedPair(Net):
    """Two layers of the last stage have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.net(x)).tanh()))


class SavesAtTheEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _saves_averages(path: str) -> Any:
    average = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    trainer([average, SavesAtTheEnd(path)], max_epochs=3).fit(TiedPair(), loader(18))
    state = torch.load(path, weights_only=False)["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
    return {name: x.clone() for name, x in state.items()}, state["one.weight"].is_set_to(state["two.weight"])


@long()
def test_averages_of_tied_weights_are_in_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    check(pool, _saves_averages, str(tmp_path / "averages.ckpt"))


@long()
def test_a_checkpoint_of_averages_is_written_on_an_exception_and_resumed(pool: Pool, tmp_path: Path) -> None:
    (one,), (whole,) = pool.run(1, _stopped, str(tmp_path / "one")), pool.run(1, _not_stopped)
    for written, *resumed in pool.run(2, _stopped, str(tmp_path / "two")):
        assert not compare(one[0], written)
        assert not compare(whole, tuple(resumed))  # plain Lightning begins its loader anew there
