"""Callbacks and modules that change which weights train, average them, or compute them from others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, kept, loader, metrics, trainer, weights


def _fit(module: Any, *callbacks: Any, **kwargs: Any) -> Any:
    t = trainer(list(callbacks), **{"max_epochs": 3, **kwargs})
    t.fit(module, loader(), loader(8, 1))
    trains = [p.requires_grad for p in module.parameters()]
    sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in t.optimizers]
    seen = weights(module), metrics(t), trains, sizes, getattr(module, "seen", None)
    return *seen, t.predict(module, loader(8, 1))


# --------------------------------------------------------------------------------------------------------------- frozen


class Frozen(Net):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.get_submodule(name).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.03)


def _frozen(*names: str) -> Any:
    return _fit(Frozen(*names), gradient_clip_val=0.1)


@slow("names0", "names1", "names3")
@pytest.mark.parametrize("names", [("net.0",), ("net.2", "net.3"), ("net",), ("head",)])
def test_frozen_layers(pool: Pool, names: tuple[str, ...]) -> None:
    check(pool, _frozen, *names)


class Backboned(Net):
    """With the name that BackboneFinetuning looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.net = self.net, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


class UnfreezesOne(BaseFinetuning):
    """Unfreezes layer after layer, adding a param group each time."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = [m for m in pl_module.backbone if list(m.parameters())]
        if epoch > 0 and epoch <= len(layers):
            self.unfreeze_and_add_param_group(layers[-epoch], optimizer, lr=0.01)


class UnfreezesByHand(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.backbone.parameters()), "lr": 0.005})


def _finetuned(kind: str) -> Any:
    module = Backboned()
    if kind == "backbone":
        return _fit(module, BackboneFinetuning(1, lambda epoch: 1.5, should_align=False, verbose=False))
    if kind == "by hand":
        module.backbone.requires_grad_(False)
        return _fit(module, UnfreezesByHand())
    return _fit(module, UnfreezesOne(), max_epochs=4)


@slow(but=["backbone"])
@pytest.mark.parametrize("kind", ["backbone", "layers", "by hand"])
def test_finetuning_unfreezes_in_the_middle_of_a_fit(pool: Pool, kind: str) -> None:
    check(pool, _finetuned, kind)


class Adapter(nn.Module):
    """LoRA around a frozen linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


class Adapted(Net):
    def __init__(self) -> None:
        super().__init__()
        for i in (0, 2):
            self.net[i] = Adapter(self.net[i])
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05)


class Merges(Callback):
    """Folds the adapters into the layers for validation, and takes them out again."""

    def _fold(self, pl_module: Any, sign: float) -> None:
        with torch.no_grad():
            for m in pl_module.modules():
                if isinstance(m, Adapter):
                    m.base.weight += sign * 0.5 * (m.up.weight @ m.down.weight)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fold(pl_module, 1.0)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._fold(pl_module, -1.0)


def _adapted(merges: bool) -> Any:
    return _fit(Adapted(), *([Merges()] if merges else []))


@slow(but=["True"])
@pytest.mark.parametrize("merges", [False, True])
def test_lora_adapters(pool: Pool, merges: bool) -> None:
    check(pool, _adapted, merges)


# -------------------------------------------------------------------------------------------------------------- average


class HandWrittenEMA(Callback):
    """A copy of the module made before or during the fit, moved towards it after each step, evaluated now and then."""

    def __init__(self, when: str) -> None:
        self.when = when
        self.seen: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.when == "setup" and stage == "fit":
            self._copy(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "fit start":
            self._copy(pl_module)

    def _copy(self, pl_module: Any) -> None:
        self.ema = copy.deepcopy(pl_module).requires_grad_(False).eval()

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for a, b in zip(self.ema.parameters(), pl_module.parameters()):
            a.mul_(0.8).add_(b.detach(), alpha=0.2)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
        pl_module.log("ema", self.ema.double()(x).square().mean())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for a, b in zip(self.ema.parameters(), pl_module.parameters()):
                b.copy_(a)


class ShadowDict(Callback):
    """An average of tensors by name, swapped in for validation."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.shadow[name].lerp_(p, 0.1)
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.data

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.backup = {name: p.data.clone() for name, p in pl_module.named_parameters()}
        for name, p in pl_module.named_parameters():
            p.data = self.shadow[name].clone()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            p.data.copy_(self.backup[name])


class EpochAverage(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


AVERAGES: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "average": lambda: EpochAverage(),
    "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
    "by hand": lambda: HandWrittenEMA("setup"),
    "by hand in the fit": lambda: HandWrittenEMA("fit start"),
    "shadow": lambda: ShadowDict(),
}


def _averaged(kind: str) -> Any:
    return _fit(Net(), AVERAGES[kind](), max_epochs=4)


@slow(but=["swa"])
@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights(pool: Pool, kind: str) -> None:
    check(pool, _averaged, kind)


def _averaged_checkpoint(folder: str) -> Any:
    module = Net()
    saves = ModelCheckpoint(folder, "last", every_n_epochs=1)
    t = trainer([EMAWeightAveraging(decay=0.7), saves], enable_checkpointing=True, max_epochs=2)
    t.fit(module, loader())
    if not t.is_global_zero:
        return None
    saved = torch.load(saves.best_model_path, weights_only=False)
    return saved["state_dict"], saved["current_model_state"], weights(module)


def test_a_checkpoint_of_averaged_weights(pool: Pool, tmp_path: Any) -> None:
    from tests.helpers.surface import compare

    (one,) = pool.run(1, _averaged_checkpoint, str(tmp_path / "one"))
    two = pool.run(2, _averaged_checkpoint, str(tmp_path / "two"))[0]
    assert not compare(one, two)


class Keeps(Net):
    """Keeps what its steps computed, and a copy of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []
        self.by_name: dict[str, Any] = {"pair": ()}
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.net)
        self.__dict__["hidden_copy"] = copy.deepcopy(self.head)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logits.append(self(batch[0]))
        self.by_name["pair"] = (batch_idx, self.logits[-1].detach().exp())
        self.last = self.logits[-1].detach() * 2
        return nn.functional.cross_entropy(self.logits[-1], batch[1])


def _keeps() -> Any:
    module, ema = Keeps(), HandWrittenEMA("fit start")
    trainer([ema]).fit(module, loader())
    copies = weights(ema.ema), weights(module.teacher), weights(module.hidden_copy), weights(module)
    return [kept(x) for x in module.logits], list(module.by_name["pair"]), module.last, copies


def test_what_user_code_kept_is_whole_after_the_fit(pool: Pool) -> None:
    check(pool, _keeps)


# ---------------------------------------------------------------------------------------------------- parametrizations


class Parametrized(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.kind = kind
        if kind == "weight norm":
            for layer in (self.net[0], self.net[2], self.head):
                parametrizations.weight_norm(layer)
        elif kind == "weight norm dim 1":
            parametrizations.weight_norm(self.net[0], dim=1)
        elif kind == "old weight norm":
            for layer in (self.net[0], self.net[2], self.head):
                nn.utils.weight_norm(layer)
        elif kind == "spectral norm":
            for layer in (self.net[0], self.net[2]):
                parametrizations.spectral_norm(layer)
        elif kind == "old spectral norm":
            for layer in (self.net[0], self.net[2]):
                nn.utils.spectral_norm(layer)
        elif kind == "orthogonal":
            parametrizations.orthogonal(self.net[0])
        elif kind == "own":
            parametrize.register_parametrization(self.net[0], "weight", Symmetric())
        elif kind == "pruned":
            prune.l1_unstructured(self.net[0], "weight", 0.3)
        elif kind == "random pruned":
            prune.random_structured(self.net[2], "weight", 0.5, dim=1)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.net[0].weight.norm()))
        if self.kind == "removed":
            parametrize.remove_parametrizations(self.net[0], "weight")


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu(1) + x.tril(-1) * 0.5


KINDS = [
    "weight norm", "weight norm dim 1", "old weight norm", "spectral norm", "old spectral norm", "orthogonal", "own",
    "pruned", "random pruned",
]  # fmt: skip


def _parametrized(kind: str) -> Any:
    module = Parametrized(kind)
    t = trainer(max_epochs=2, must_split=False)
    t.fit(module, loader(), loader(8, 1))
    state = {name: kept(value) for name, value in module.state_dict().items()}
    return module.seen, state, metrics(t), t.predict(module, loader(8, 1))


@slow(but=["own"])
@pytest.mark.parametrize("kind", KINDS)
def test_parametrizations(pool: Pool, kind: str) -> None:
    check(pool, _parametrized, kind)


PRUNING: dict[str, dict[str, Any]] = {
    "l1": dict(pruning_fn="l1_unstructured", amount=0.3),
    "global": dict(pruning_fn="l1_unstructured", amount=0.4, use_global_unstructured=True),
    "structured": dict(
        pruning_fn="ln_structured", amount=0.25, pruning_dim=0, pruning_norm=2, use_global_unstructured=False
    ),
    "columns": dict(
        pruning_fn="ln_structured", amount=0.5, pruning_dim=1, pruning_norm=1, use_global_unstructured=False
    ),
    "kept": dict(pruning_fn="l1_unstructured", amount=0.3, make_pruning_permanent=False),
    "random": dict(pruning_fn="random_unstructured", amount=0.2, use_global_unstructured=False),
    # A second time it would not: on the CPU Lightning trains its copy of the first weights, which it resets to, along.
    "lottery": dict(pruning_fn="l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=True),
}


def _pruned(kind: str) -> Any:
    module = Net().double()  # pruning computes weights before the Trainer casts
    layers = [(module.net[0], "weight"), (module.net[2], "weight"), (module.head, "weight")]
    options = {"use_lottery_ticket_hypothesis": False, **PRUNING[kind]}
    pruning = ModelPruning(parameters_to_prune=layers, **options)
    # Weights that are masked in each forward are left whole at the next start.
    return _fit(module, pruning, max_epochs=1 if kind == "lottery" else 3, must_split=kind != "kept")


@slow(but=["kept"])
@pytest.mark.parametrize("kind", PRUNING)
def test_model_pruning(pool: Pool, kind: str) -> None:
    check(pool, _pruned, kind)
