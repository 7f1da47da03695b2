"""Features of Lightning and torch under each strategy: each works as on one device, or is refused by name.

Each cell of the table in `docs/features.md` is run here. A feature is a function of where it runs; what it returns must
be one device's on every rank, to 1e-9 in float64. Replicas are compared with those of Lightning's own DDP, rank by
rank, since each logs what its own batches gave. `python -m tests.law.test_features` prints the table.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.helpers import surface
from tests.helpers.accelerator import device_type
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import kept, metrics, weights

V, T, C, BATCH, STEPS = 11, 8, 8, 4, 3

ONE, DDP = "one device", "Lightning's DDP"
PLACES = {"embed": 0, "blocks.0": 1, "blocks.1": 0, "norm": 1, "head": 1}
STRATEGIES: dict[str, Callable[[Any], Any]] = {  # of the number of microbatches
    ONE: lambda _: "auto",
    DDP: lambda _: DDPStrategy(find_unused_parameters=True),
    "data, ddp": lambda _: HybridParallelStrategy(data_parallel_size=2),
    "data, fsdp": lambda _: HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
    "tensor": lambda _: TensorParallelStrategy(2),
    "tensor, shard_residual": lambda _: TensorParallelStrategy(2, shard_residual=True),
    "pipeline": lambda microbatches: PipelineParallelStrategy(2, microbatches=microbatches),
    "sequence": lambda _: SequenceParallelStrategy(2),
    "placement": lambda _: LayerPlacementStrategy(PLACES),
}
COLUMNS = [name for name in STRATEGIES if name not in (ONE, DDP)]
REPLICAS = ("data, ddp", "data, fsdp")
STAGES = ("pipeline", "placement")


# ------------------------------------------------------------------------------------------------------------ the model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(C), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Net(LightningModule):
    """A language model of two blocks, which knows nothing of layouts."""

    def __init__(self, lr: float = 0.03) -> None:
        super().__init__()
        self.lr = lr
        self.seen: list[Any] = []
        self.hooked: dict[str, list[Tensor]] = {}
        self.build()

    def build(self) -> None:
        torch.manual_seed(5)
        self.embed = nn.Embedding(V, C)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.seen.append(kept(loss))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def note(self, name: str, value: Tensor) -> None:
        self.hooked.setdefault(name, []).append(value.detach().clone())


def tokens(size: int, seed: int) -> Tensor:
    return torch.randint(V, (size, T + 1), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class At:
    """Where a feature runs: its column, and a folder that the ranks share."""

    column: str
    folder: Path
    microbatches: int | Literal["auto"] = 2

    @property
    def replicas(self) -> int:
        return 2 if self.column in (DDP, *REPLICAS) else 1

    def whole(self) -> At:
        """The same where samples need one another, or hooks the whole batch: a pipeline cuts none then."""
        return replace(self, microbatches="auto")

    def loader(self, seed: int = 0, steps: int = STEPS) -> DataLoader[Any]:
        return DataLoader(tokens(BATCH * steps * self.replicas, seed), BATCH)  # type: ignore[arg-type]

    def trainer(self, *callbacks: Any, **options: Any) -> Trainer:
        strategy = STRATEGIES[self.column](self.microbatches)
        return surface.trainer(list(callbacks), must_split=False, **{"strategy": strategy, **options})

    def fit(self, module: Net | None = None, *callbacks: Any, **options: Any) -> dict[str, Any]:
        """Train, and give back all that a user sees."""
        module = module or Net()
        trainer = self.trainer(*callbacks, **options)
        trainer.fit(module, self.loader(), self.loader(1, 1))
        return {"module": result(module), "metrics": metrics(trainer), "steps": trainer.global_step}


def result(module: Net) -> dict[str, Any]:
    return {"weights": weights(module), "seen": module.seen, "hooked": module.hooked}


# --------------------------------------------------------------------------------------------------- ways to train


class Low(Net):
    """SGD: AdamW would magnify the rounding of a gradient that is nearly zero."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def low(precision: str) -> Callable[[At], Any]:
    """Weights that were trained in a low precision, and in float64."""

    def run(at: At) -> Any:
        module, exact = Low(), Low()
        plugins = [MixedPrecision("16-mixed", device_type(), torch.amp.GradScaler(device_type(), init_scale=1024.0))]
        options: dict[str, Any] = dict(plugins=plugins) if precision == "16-mixed" else dict(precision=precision)
        at.trainer(**options).fit(module, at.loader())
        if at.column in (ONE, DDP):
            at.trainer().fit(exact, at.loader())
        return {"low": weights(module), "exact": weights(exact)}

    return run


def options(**kwargs: Any) -> Callable[[At], Any]:
    return lambda at: at.fit(**kwargs)


class Adversaries(Net):
    """Two optimizers, in turn, each for one half of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch) * sign
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(kept(loss))

    def configure_optimizers(self) -> Any:
        halves = [self.embed, self.blocks[0]], [self.blocks[1], self.norm, self.head]
        return [torch.optim.Adam(nn.ModuleList(half).parameters(), lr=0.01) for half in halves]


class Quasi(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Scheduled(Net):
    def __init__(self, plateau: bool) -> None:
        super().__init__()
        self.plateau = plateau

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.plateau:
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        return [optimizer], [{"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.3, 3 * STEPS), "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append([group["lr"] for group in self.optimizers().param_groups])


def lr_find(at: At) -> Any:
    module, trainer = Net(), at.trainer()
    found = Tuner(trainer).lr_find(
        module, at.loader(), min_lr=1e-4, max_lr=0.1, num_training=6, early_stop_threshold=None, update_attr=True
    )
    assert found is not None
    return found.results, found.suggestion(), module.lr, weights(module)


class Sized(Net):
    batch_size = BATCH

    def train_dataloader(self) -> Any:
        return DataLoader(tokens(64, 0), self.batch_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def batch_size(at: At) -> Any:
    at.trainer(BatchSizeFinder(max_trials=1, steps_per_trial=1)).fit(Sized())


class Late(Net):
    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            super().build()


def entry_points(at: At) -> Any:
    module, trainer = Net(), at.trainer()
    before = trainer.validate(module, at.loader(1), verbose=False)
    trainer.fit(module, at.loader(), at.loader(1))
    after = trainer.test(module, at.loader(2), verbose=False)
    return before, after, trainer.predict(module, at.loader(2)), result(module)


# --------------------------------------------------------------------------------------------- logging and callbacks


class Logs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(V)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("mean", logits.mean(), on_epoch=True)
        return loss


class Measures(Logs):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        self.accuracy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])


def monitors(at: At) -> Any:
    module = Net(lr=0.3)
    best = ModelCheckpoint(at.folder, "{epoch}-{val:.4f}", monitor="val", save_top_k=2)
    stop, logger = EarlyStopping("val", patience=1), CSVLogger(at.folder, version=0)
    trainer = at.trainer(
        best, stop, LearningRateMonitor("step"), logger=logger, enable_checkpointing=True, max_epochs=5
    )
    trainer.fit(module, at.loader(), at.loader(1))
    tested = trainer.test(module, at.loader(2), ckpt_path="best", verbose=False)
    names = Path(best.best_model_path).name, sorted(file.name for file in at.folder.glob("*.ckpt"))
    return names, best.best_model_score, stop.stopped_epoch, tested, result(module)


def resume(at: At) -> Any:
    saves = ModelCheckpoint(at.folder, "first")
    at.trainer(saves, enable_checkpointing=True).fit(Net(), at.loader())
    module, trainer = Net(lr=1.0), at.trainer(max_epochs=2)
    trainer.fit(module, at.loader(), ckpt_path=at.folder / "first.ckpt")
    return result(module), trainer.global_step


# ----------------------------------------------------------------------------------- compiled, recomputed, hooked


class Compiled(Net):
    """Torch's own front ends and no code generator, which would take seconds a cell."""

    def build(self) -> None:
        super().build()
        self.blocks[0].mlp = torch.compile(self.blocks[0].mlp, backend="aot_eager")


class CompiledInPlace(Net):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend="aot_eager")


def compiled_whole(at: At) -> Any:
    """All entry points, since Lightning compiles each one's step.

    The reference is not compiled: torch 2.13 fails at Lightning's ``log`` in a training step, which is compiled there.
    """
    module, trainer = Net(), at.trainer(max_epochs=2)
    compiled: Any = module if at.column in (ONE, DDP) else torch.compile(module, backend="aot_eager")  # type: ignore[arg-type]
    trainer.fit(compiled, at.loader(), at.loader(1, 1))
    seen = {"fit": metrics(trainer), "steps": trainer.global_step}
    tested = (
        trainer.validate(compiled, at.loader(1), verbose=False),
        trainer.test(compiled, at.loader(2), verbose=False),
    )
    return seen, tested, trainer.predict(compiled, at.loader(2)), result(module)


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Watched(nn.Sequential):
    """Puts a hook on a tensor inside, which changes its gradient, too."""

    def forward(self, x: Tensor) -> Tensor:
        norm, first, act, last = self
        hidden = first(norm(x))
        if hidden.requires_grad:
            hidden.register_hook(self.watch)
        return last(act(hidden))


class Activations(Net):
    """Hooks of tensors: inside an MLP, between blocks, of the logits."""

    def build(self) -> None:
        super().build()
        self.blocks[0].mlp = Watched(*self.blocks[0].mlp)
        self.blocks[0].mlp.watch = lambda grad: self._fired("hidden", grad)

    def _fired(self, name: str, grad: Tensor) -> Tensor:
        self.note(name, grad)
        return grad * 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if x.requires_grad:
            x.register_hook(lambda grad: self._fired("between", grad))
        logits = self.head(self.norm(self.blocks[1](x)))
        if logits.requires_grad:
            logits.register_hook(lambda grad: self._fired("logits", grad))
        return logits


class Gradients(Net):
    """Hooks of parameters, which change their gradients, too."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            if after:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self._after(name, p))
            else:
                p.register_hook(lambda grad, name=name: self._before(name, grad))

    def _before(self, name: str, grad: Tensor) -> Tensor:
        self.note(name, grad)
        return grad.clamp(-0.01, 0.01)

    def _after(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        self.note(name, p.grad)
        p.grad.clamp_(-0.01, 0.01)


class Forwards(Net):
    """Hooks that keep features and change them."""

    def build(self) -> None:
        super().build()
        self.blocks[0].mlp[0].register_forward_pre_hook(lambda _, args: self.note("in", args[0]))
        self.blocks[0].mlp[1].register_forward_hook(lambda _, args, out: self._features(out))
        self.head.register_forward_hook(lambda _, args, out: self.note("out", out))

    def _features(self, out: Tensor) -> Tensor:
        self.note("hidden", out)
        return out * 2


class Backwards(Net):
    """Hooks on what goes back through a module, which change it, too."""

    def build(self) -> None:
        super().build()
        for name in ("blocks.0", "blocks.0.mlp.1", "head"):
            self.get_submodule(name).register_full_backward_hook(
                lambda _, into, out, name=name: self._went(name, into, out)
            )

    def _went(self, name: str, into: Any, out: Any) -> Any:
        self.note(f"{name} in", into[0])
        self.note(f"{name} out", out[0])
        return (into[0] * 0.5,)


# -------------------------------------------------------------------------------------------------------------- batches


class Normed(Net):
    def build(self) -> None:
        super().build()
        self.batch_norm = nn.BatchNorm1d(C)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.batch_norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(self.blocks[1](self.blocks[0](x))))


class OfAll(nn.BatchNorm1d):
    """By hand over all processes, on any device."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return super().forward(torch.cat(all_gather(x.contiguous()))).chunk(2)[dist.get_rank()]


def synced(at: At) -> Any:
    module = Normed()
    if at.column == DDP:  # torch's own does not run on CPU
        module.batch_norm = OfAll(C)
    return at.whole().fit(module, sync_batchnorm=at.column != DDP)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(tokens(BATCH * STEPS, 3))


def stream(at: At) -> Any:
    module, trainer = Net(), at.trainer(max_epochs=2)
    trainer.fit(module, DataLoader(Stream(), BATCH))
    return result(module), trainer.global_step


def barebones(at: At) -> Any:
    module = Net()
    at.trainer(barebones=True).fit(module, at.loader())
    return weights(module)


# -------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Feature:
    """A row.

    Args:
        run: what runs.
        refused: the columns that refuse it, and a part of what they say.
        tolerance: how closely it is compared.
        like: the row that gives the reference, where the row itself does not run under Lightning's DDP.
        on_gpus: whether GPUs run what is refused.
    """

    run: Callable[[At], Any]
    refused: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-9
    like: str | None = None
    on_gpus: bool = False


SINGLE = 1e-6  # torchmetrics and Lightning keep means in float32

FEATURES: dict[str, Feature] = {
    '`precision="64-true"`': Feature(options()),
    **{f'`precision="{name}"`': Feature(low(name)) for name in ("32-true", "bf16-mixed", "bf16-true")},
    '`"16-mixed"` with a gradient scaler': Feature(low("16-mixed")),
    "`gradient_clip_val` by norm": Feature(options(gradient_clip_val=0.05)),
    "`gradient_clip_val` by value": Feature(options(gradient_clip_val=0.005, gradient_clip_algorithm="value")),
    "`accumulate_grad_batches`": Feature(options(accumulate_grad_batches=2, max_epochs=2)),
    "`GradientAccumulationScheduler`": Feature(
        lambda at: at.fit(Net(), GradientAccumulationScheduler({0: 1, 1: 2}), max_epochs=2)
    ),
    "several optimizers, manual optimization": Feature(lambda at: at.whole().fit(Adversaries())),
    "LBFGS": Feature(lambda at: at.fit(Quasi())),
    "learning rate schedulers": Feature(lambda at: at.fit(Scheduled(False), max_epochs=3)),
    "`ReduceLROnPlateau`": Feature(lambda at: at.fit(Scheduled(True), max_epochs=3)),
    "`validate` before `fit`, `test`, `predict`": Feature(entry_points),
    "`self.log` with `on_epoch`, `sync_dist`, `reduce_fx`": Feature(lambda at: at.fit(Logs()), tolerance=SINGLE),
    "a torchmetrics metric as attribute": Feature(lambda at: at.fit(Measures()), tolerance=SINGLE),
    "`EarlyStopping`, `ModelCheckpoint(monitor=...)`, `LearningRateMonitor`": Feature(monitors, tolerance=SINGLE),
    "resume by `ckpt_path`": Feature(resume),
    "`StochasticWeightAveraging`": Feature(
        lambda at: at.fit(Net(), StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1), max_epochs=3)
    ),
    "`EMAWeightAveraging`": Feature(lambda at: at.fit(Net(), EMAWeightAveraging(decay=0.7))),
    "`Tuner.lr_find`": Feature(lr_find),
    "`BatchSizeFinder`": Feature(
        batch_size,
        dict.fromkeys(COLUMNS, "BatchSizeFinder run until memory is short, which one of the 2 ranks may meet alone")
        | dict.fromkeys(REPLICAS, "The Batch size finder is not supported with distributed strategies"),
    ),
    "`configure_model`": Feature(lambda at: at.fit(Late())),
    "`torch.compile` of a submodule": Feature(lambda at: at.fit(Compiled())),
    "a submodule's `.compile()`": Feature(lambda at: at.fit(CompiledInPlace())),
    "`torch.compile` of the LightningModule": Feature(compiled_whole),
    "activation checkpointing, `use_reentrant=False`": Feature(lambda at: at.fit(Checkpointed(False))),
    "activation checkpointing, `use_reentrant=True`": Feature(
        lambda at: at.whole().fit(Checkpointed(True)),
        dict.fromkeys(STAGES, "Reentrant checkpointing at")
        | {"tensor, shard_residual": "loses gradients under shard_residual=True"},
        like="activation checkpointing, `use_reentrant=False`",
    ),
    "`register_hook` of activations": Feature(lambda at: at.whole().fit(Activations())),
    "`register_hook` of parameters": Feature(lambda at: at.fit(Gradients(False))),
    "`register_post_accumulate_grad_hook`": Feature(
        lambda at: at.fit(Gradients(True)),
        dict.fromkeys(
            ("data, ddp", "data, fsdp", "tensor, shard_residual", "sequence"),
            "which runs before the ranks' gradients are synced",
        ),
    ),
    "forward hooks of modules": Feature(lambda at: at.whole().fit(Forwards())),
    "full backward hooks of modules": Feature(lambda at: at.whole().fit(Backwards())),
    "`overfit_batches`": Feature(options(overfit_batches=2, max_epochs=2)),
    "`fast_dev_run`": Feature(options(fast_dev_run=2)),
    "`profiler`, `detect_anomaly`, `deterministic`, `inference_mode=False`": Feature(
        options(profiler="simple", detect_anomaly=True, deterministic=True, inference_mode=False)
    ),
    "`sync_batchnorm`": Feature(synced),
    "an `IterableDataset`": Feature(stream),
    "`use_distributed_sampler=False`": Feature(options(use_distributed_sampler=False)),
    "`barebones`": Feature(barebones),
}


def run_one(column: str, folder: str, name: str) -> tuple[str, Any]:
    """A feature on this rank: what it gave, or the message of what it raised."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    try:
        return "gave", FEATURES[name].run(At(column, place))
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def run_all(column: str, names: list[str], folder: str) -> dict[str, tuple[str, Any]]:
    """Features on this rank, one after the other."""
    found = {}
    for number, name in enumerate(names):
        found[name] = run_one(column, f"{folder}/{number}", name)
        torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.barrier()
    return found


class Cells:
    """Runs all of a column's cells that are to be tested when the first of them is asked for."""

    def __init__(self, pool: Pool, folder: Path, asked: list[tuple[str, str]]) -> None:
        self.pool, self.folder = pool, folder
        references = [(_reference(column), FEATURES[name].like or name) for column, name in asked]
        self.asked = dict.fromkeys([*asked, *references])
        self.columns: dict[str, list[dict[str, tuple[str, Any]]]] = {}

    def run(self, column: str, name: str) -> list[tuple[str, Any]]:
        """What the cell gave on each rank."""
        if column not in self.columns:
            ranks, folder = 1 if column == ONE else 2, str(self.folder / column)
            names = [name for other, name in self.asked if other == column]
            self.columns[column] = self.pool.run(ranks, run_all, column, names, folder)
        return copy.deepcopy([rank[name] for rank in self.columns[column]])

    def reference(self, column: str, name: str) -> list[Any]:
        """What each rank should give."""
        reference = _reference(column)
        found = self.run(reference, FEATURES[name].like or name)
        assert all(kind == "gave" for kind, _ in found), found[0][1]
        values = [value for _, value in found]
        return values if reference == DDP else [values[0], copy.deepcopy(values[0])]


def _reference(column: str) -> str:
    return DDP if column in REPLICAS else ONE


@pytest.fixture(scope="module")
def cells(pool: Pool, tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], list[Any]]) -> Cells:
    rows = [(row["column"], row["name"]) for row in asked("test_a_cell")]
    return Cells(pool, tmp_path_factory.mktemp("features"), rows)


@slow()
@pytest.mark.parametrize(
    ("column", "name"),
    [(column, name) for column in COLUMNS for name in FEATURES],
)
def test_a_cell(cells: Cells, name: str, column: str, pytestconfig: pytest.Config) -> None:
    feature, found = FEATURES[name], cells.run(column, name)
    if column in feature.refused and not (feature.on_gpus and pytestconfig.getoption("--gpu-rules")):
        for kind, message in found:
            assert kind == "raised" and feature.refused[column] in message, message
        return
    for kind, message in found:
        assert kind == "gave", message
    results, references = [value for _, value in found], cells.reference(column, name)
    lines = differences(results, references, feature.tolerance)
    assert not lines, "\n" + "\n".join(lines[:30]) + f"\n{len(lines)} in all"


def differences(results: list[Any], references: list[Any], tolerance: float) -> list[str]:
    """What a user would see that one device does not show."""
    if isinstance(references[0], dict) and "low" in references[0]:
        return [line for pair in zip(results, references, strict=True) for line in _less_exact(*pair)]
    hooked = [[pop_hooked(x) for x in group] for group in (results, references)]
    lines = _hooks_differ(*hooked, tolerance)
    for rank, (given, wanted) in enumerate(zip(results, references, strict=True)):
        lines += [f"rank {rank}: {line}" for line in surface.compare(wanted, given, tolerance)]
    return lines


def pop_hooked(found: Any) -> dict[str, list[Tensor]]:
    is_fit = isinstance(found, dict) and "module" in found
    return found["module"].pop("hooked", {}) if is_fit else {}


def _less_exact(given: Any, wanted: Any) -> list[str]:
    """In low precision a layout may be off from float64 by twice what one device is."""
    own, error = (_distance(found["low"], wanted["exact"]) for found in (wanted, given))
    dtypes = [{name: x.dtype for name, x in found["low"].items()} for found in (wanted, given)]
    lines = [] if dtypes[0] == dtypes[1] else [f"dtypes are {dtypes[1]}, not {dtypes[0]}"]
    return lines if error <= 2 * own else [*lines, f"off by {error:.2e}, one device by {own:.2e}"]


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum((a[name].double() - x).square().sum().item() for name, x in b.items()) ** 0.5


def _hooks_differ(given: list[Any], wanted: list[Any], tolerance: float) -> list[str]:
    """A stage tells the hooks of its own modules: together they see what one device's see."""
    lines = []
    for rank, (mine, whole) in enumerate(zip(given, wanted, strict=True)):
        for name, seen in mine.items():
            expected = [whole.get(name, [])]
            lines += [f"rank {rank}, hook {name}: {line}" for line in surface.compare(expected, [seen], tolerance)]
    missing = set(wanted[0]) - {name for mine in given for name in mine}
    return lines + [f"hook {name} never fired" for name in sorted(missing)]


# -------------------------------------------------------------------------------------------------------- the page


def page_table() -> str:
    """The table in `docs/features.md`, of the same data that the tests are made from."""
    rows = [f"| feature | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    reasons: dict[str, int] = {}
    for name, feature in FEATURES.items():
        cells = []
        for column in COLUMNS:
            if reason := feature.refused.get(column):
                cells.append(f"refused ({reasons.setdefault(reason, 1 + len(reasons))})")
            else:
                cells.append("yes")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. \u201c\u2026{reason}\u2026\u201d" for reason, number in reasons.items()]
    return "\n".join([*rows, "", "The refusals say:", "", *notes])


def test_the_page_shows_this_table() -> None:
    assert page_table() in (Path(__file__).parents[2] / "docs" / "features.md").read_text()


if __name__ == "__main__":
    print(page_table())
