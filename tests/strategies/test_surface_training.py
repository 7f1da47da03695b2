"""Ways to train: accumulation, clipping, schedulers, manual optimization, low precision, the Trainer's own options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, kept, loader, metrics, trainer, weights


class Watched(Net):
    """Keeps what a user's hooks would see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(kept(loss))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: value.item() for name, value in grad_norm(self, 2).items()})

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append([group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups])


def _options(**kwargs: Any) -> Any:
    module = Watched()
    t = trainer(**{"max_epochs": 2, **kwargs})
    t.fit(module, loader(), loader(8, 1))
    return module.seen, metrics(t), weights(module), t.global_step, t.current_epoch


OPTIONS: dict[str, dict[str, Any]] = {
    "short window": dict(accumulate_grad_batches=3),
    "clip by norm": dict(gradient_clip_val=0.1),
    "clip by value": dict(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "clip and short window": dict(gradient_clip_val=0.1, accumulate_grad_batches=2),
    "fast dev run": dict(fast_dev_run=2),
    "limits": dict(limit_train_batches=0.6, limit_val_batches=1),
    "overfit": dict(overfit_batches=2),
    "val check interval": dict(val_check_interval=2, num_sanity_val_steps=2),
    "check val every n": dict(check_val_every_n_epoch=2),
    "max steps": dict(max_epochs=-1, max_steps=7),
    "max time": dict(max_time="00:01:00:00"),
    "min epochs": dict(min_epochs=2, max_epochs=3),
    "detect anomaly": dict(detect_anomaly=True, max_epochs=1),
    "simple profiler": dict(profiler="simple"),
    "advanced profiler": dict(profiler="advanced", max_epochs=1),
    "reload": dict(reload_dataloaders_every_n_epochs=1),
    "deterministic": dict(deterministic=True),
    "inference mode off": dict(inference_mode=False),
    "no distributed sampler": dict(use_distributed_sampler=False),
}


@slow(but=["deterministic", "fast dev run"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_trainer(pool: Pool, option: str) -> None:
    check(pool, _options, **OPTIONS[option])


def _barebones() -> Any:
    module = Net()
    t = trainer(barebones=True)
    t.fit(module, loader())
    return weights(module)


def test_barebones(pool: Pool) -> None:
    check(pool, _barebones)


def _accumulation_scheduler() -> Any:
    module = Watched()
    t = trainer([GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})], max_epochs=3)
    t.fit(module, loader())
    return module.seen, weights(module), t.global_step


def test_accumulation_that_changes_by_epoch(pool: Pool) -> None:
    check(pool, _accumulation_scheduler)


class Scheduled(Watched):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.kind == "step":
            return [optimizer], [{"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.3, 15), "interval": "step"}]
        if self.kind == "epoch":
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.3)]
        if self.kind == "two":
            warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
            return [optimizer], [{"scheduler": warmup, "interval": "step", "frequency": 2}]
        if self.kind == "swap":
            other = torch.optim.Adam(self.head.parameters())
            return {"optimizer": other, "lr_scheduler": lr_scheduler.LambdaLR(other, lambda epoch: 1 / (1 + epoch))}
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.kind}}


def _scheduled(kind: str) -> Any:
    module = Scheduled(kind)
    t = trainer(max_epochs=3)
    t.fit(module, loader(), loader(8, 1))
    return module.seen, weights(module)


@slow(but=["two"])
@pytest.mark.parametrize("kind", ["step", "epoch", "two", "swap", "val", "train"])
def test_schedulers(pool: Pool, kind: str) -> None:
    check(pool, _scheduled, kind)


class Manual(Watched):
    """Two optimizers, toggled in turn, with its own accumulation and clipping."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam(self.net.parameters(), lr=0.01)
        two = torch.optim.SGD(self.head.parameters(), lr=0.1)
        return [one, two], [lr_scheduler.StepLR(one, 2, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for i, optimizer in enumerate(self.optimizers()):
            if self.how == "toggle":
                self.toggle_optimizer(optimizer)
                self.seen.append([p.requires_grad for p in self.parameters()])
            loss = self.loss(batch)
            self.seen.append(kept(loss))
            if self.how != "accumulate" or batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.manual_backward(loss)
            if self.how == "clip norm":
                self.clip_gradients(optimizer, 0.05, "norm")
            elif self.how == "clip value":
                self.clip_gradients(optimizer, 0.01, "value")
            elif self.how == "torch clip":
                self.seen.append(kept(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))
            elif self.how == "torch clip value":
                nn.utils.clip_grad_value_(self.parameters(), 0.01)
            if self.how == "closure":
                optimizer.step(closure=lambda: self.loss(batch))
            elif self.how != "accumulate" or batch_idx % 2 == 1:
                optimizer.step()
            if self.how == "toggle":
                self.untoggle_optimizer(optimizer)
            elif self.how == "toggled model":
                with optimizer.toggle_model():
                    self.manual_backward(self.loss(batch))
                    optimizer.step()
            if i == 0:
                self.lr_schedulers().step()
        self.log("train", loss)


MANUAL = ["plain", "toggle", "toggled model", "clip norm", "clip value", "torch clip", "torch clip value", "accumulate"]


def _manual(how: str) -> Any:
    module = Manual(how)
    t = trainer(max_epochs=2)
    t.fit(module, loader())
    return module.seen, metrics(t), weights(module), t.global_step


@slow(but=["clip value"])
@pytest.mark.parametrize("how", [*MANUAL, "closure"])
def test_manual_optimization(pool: Pool, how: str) -> None:
    check(pool, _manual, how)


class Low(Net):
    """SGD: AdamW would magnify the rounding of a gradient that is nearly zero."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Overflows(Low):
    """The loss of one batch makes one entry of one gradient infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:  # in the first rows, which the first rank holds
            loss = loss + self.net[0].weight[0, 0] * 1e38 * 1e38 / 1e38
        return loss


def _scaled(overflows: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    module = (Overflows if overflows else Low)()
    t = trainer(plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)], gradient_clip_val=0.5)
    t.fit(module, loader(dtype=torch.float32))
    return scaler.get_scale(), t.global_step, weights(module)


@slow(but=["True"])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_gradient_scaler_skips_the_same_steps(pool: Pool, overflows: bool) -> None:
    check(pool, _scaled, overflows, tolerance=1e-2)
    one, two = pool.run(2, _scaled, overflows)
    assert one[0] == two[0]
    assert all(torch.equal(x, two[2][name]) for name, x in one[2].items())


def _precision(precision: str) -> Any:
    module = Low()
    t = trainer(precision=precision)
    t.fit(module, loader(dtype=torch.float32))
    return weights(module)


@slow(but=["bf16-true"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_precisions_keep_their_dtypes(pool: Pool, precision: str) -> None:
    check(pool, _precision, precision, tolerance=1e-4 if precision == "32-true" else 0.1)


class Hooks(Watched):
    """Reads and writes parameters and gradients from hooks, as users do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_after_backward(self) -> None:
        if self.how == "clip in hook":
            self.seen.append(kept(nn.utils.clip_grad_norm_(self.parameters(), 0.1)))
        elif self.how == "clip inf norm":
            self.seen.append(kept(nn.utils.clip_grad_norm_(self.parameters(), 0.01, norm_type=float("inf"))))
        elif self.how == "clip without foreach":
            self.seen.append(kept(nn.utils.clip_grad_norm_(self.parameters(), 0.1, foreach=False)))
        elif self.how == "scale gradients":
            for p in self.parameters():
                p.grad *= 0.5
        elif self.how == "noise in gradients":
            for p in self.parameters():
                p.grad = p.grad + torch.randn_like(p.data.new_zeros(p.shape)) * 0.1
        elif self.how == "replace gradients":
            for p in self.parameters():
                p.grad = torch.sign(p.grad)
        elif self.how == "nan check":
            self.seen.append([bool(torch.isfinite(p.grad).all()) for p in self.parameters()])
        elif self.how == "centralize":
            for p in self.parameters():
                if p.grad.dim() > 1:
                    p.grad.add_(-p.grad.mean(dim=1, keepdim=True))
        elif self.how == "stacked norms":
            norms = torch.stack([p.grad.detach().norm(2) for p in self.parameters()])
            self.seen.append(kept(norms.norm(2)))
        elif self.how == "get total norm":
            self.seen.append(kept(nn.utils.get_total_norm([p.grad for p in self.parameters()])))
        elif self.how == "flat gradient":
            self.seen.append(kept(torch.cat([p.grad.view(-1) for p in self.parameters()])))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.how == "clamp data":
            for p in self.parameters():
                p.data.clamp_(-0.2, 0.2)
        elif self.how == "clamp no grad":
            with torch.no_grad():
                for p in self.parameters():
                    p.clamp_(-0.2, 0.2)
        elif self.how == "decay":
            with torch.no_grad():
                for p in self.parameters():
                    p.mul_(0.9)
                self.head.weight[2:4] = 0.25
                self.net[0].weight.data[:, 1] = 0.5
        elif self.how == "weight norms":
            for name, p in self.named_parameters():
                self.log(f"norm/{name}", p.norm())
                self.log(f"mean/{name}", p.data.mean())
                self.seen.append(float(p.abs().max()))
        elif self.how == "vector":
            vector = nn.utils.parameters_to_vector(self.parameters())
            self.seen.append(kept(vector))
            nn.utils.vector_to_parameters(vector * 0.99, self.parameters())
        elif self.how == "renorm rows":
            with torch.no_grad():
                self.head.weight.copy_(nn.functional.normalize(self.head.weight, dim=0))
                self.net[0].weight.div_(self.net[0].weight.norm(dim=1, keepdim=True))
        elif self.how == "numpy":
            self.seen.append(torch.from_numpy(self.net[0].weight.detach().cpu().numpy().copy()))
            self.seen.append(self.head.weight.tolist())
        elif self.how == "state dict":
            self.seen.append({name: float(value.sum()) for name, value in self.state_dict().items()})
        elif self.how == "load state dict":
            self.load_state_dict({name: value * 0.99 for name, value in self.state_dict().items()})
        elif self.how == "re-init":
            nn.init.xavier_uniform_(self.net[0].weight)
            nn.init.normal_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def on_train_epoch_end(self) -> None:
        if self.how == "module call":
            self.eval()
            with torch.no_grad():
                x = torch.ones(2, 6, dtype=torch.float64)
                logits = self(x)
                self.seen.append(kept(logits.argmax(-1)))
                self.seen.append(float(logits.softmax(-1).max()))
                self.log("outside", logits.sum())
                for _ in range(3):  # as a loop that generates
                    x = x + self(x)[:, :6]
                self.seen.append(x.sum().item())
                self.seen.append(torch.multinomial(self(x).softmax(-1), 1))
            self.train()


HOOKS = [
    "clip in hook", "clip inf norm", "clip without foreach", "scale gradients", "noise in gradients",
    "replace gradients", "nan check", "centralize", "stacked norms", "get total norm", "flat gradient", "clamp data",
    "clamp no grad", "decay", "weight norms", "vector", "renorm rows", "numpy", "state dict", "load state dict",
    "re-init", "module call",
]  # fmt: skip


def _hooks(how: str) -> Any:
    module = Hooks(how)
    t = trainer(max_epochs=2)
    t.fit(module, loader())
    return module.seen, metrics(t), weights(module)


@slow(but=["noise in gradients"])
@pytest.mark.parametrize("how", HOOKS)
def test_a_users_hook(pool: Pool, how: str) -> None:
    check(pool, _hooks, how)


def _lr_find() -> Any:
    module = Net()
    t = trainer(max_epochs=3)
    found = Tuner(t).lr_find(module, loader(), min_lr=1e-4, max_lr=1.0, num_training=12, early_stop_threshold=None)
    assert found is not None
    before = weights(module)
    t.fit(module, loader())
    return found.results, found.suggestion(), module.lr, before, weights(module), metrics(t)


def test_lr_find(pool: Pool) -> None:
    check(pool, _lr_find)


class Sized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(40, batch_size=self.batch_size)

    val_dataloader = train_dataloader


def _scale_batch_size() -> Any:
    Tuner(trainer()).scale_batch_size(Sized(), mode="power", steps_per_trial=2, max_trials=3)


def test_scale_batch_size_is_refused_by_name(pool: Pool) -> None:
    pool.run(1, _scale_batch_size)
    with pytest.raises(RanksFailedError, match=r"scale_batch_size\(\) and .* one of the 2 ranks .* with devices=1"):
        pool.run(2, _scale_batch_size)


def _csv(folder: str) -> Any:
    module = Scheduled("step")
    logger = CSVLogger(folder, name="log", version=0)
    t = trainer([LearningRateMonitor(log_momentum=True)], logger=logger, log_every_n_steps=1, max_epochs=2)
    t.fit(module, loader(), loader(8, 1))
    return None


@slow()
def test_the_csv_file_equals_one_devices(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _csv, str(tmp_path / "one"))
    pool.run(2, _csv, str(tmp_path / "two"))
    one, two = ((tmp_path / name / "log/version_0/metrics.csv").read_text().splitlines() for name in ("one", "two"))
    assert one[0] == two[0] and len(one) == len(two) > 10
    for a, b in zip(one[1:], two[1:]):
        for x, y in zip(a.split(","), b.split(",")):
            assert x == y or float(x) == pytest.approx(float(y), rel=1e-9)
