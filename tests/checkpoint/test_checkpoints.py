"""A checkpoint is what one device writes, whatever the layout; what one layout saves another resumes."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.strategies import end_of_run
from tests.helpers.differences import differences
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

LAYOUTS: dict[str, dict[str, Any] | None] = {
    "one": None,
    "tp2": dict(tensor_parallel_size=2),
    "tp4": dict(tensor_parallel_size=4),
    "dp2-tp2": dict(tensor_parallel_size=2, data_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2, microbatches=2),
    "pp2-whole": dict(pipeline_parallel_size=2, microbatches=1),
    "pp4": dict(pipeline_parallel_size=4, microbatches=4),
    "zbv": dict(schedule="zbv", microbatches=2),
    "dp2-pp2": dict(pipeline_parallel_size=2, data_parallel_size=2, microbatches=2),
    "interleaved": dict(pipeline_parallel_size=2, schedule="interleaved_1f1b", microbatches=2),
    "sp2": dict(sequence_parallel_size=2),
    "placed": dict(placement={"embedding": 0, "up": 1, "down": 1, "norm": 0, "head": 0}),
    "placed3": dict(placement={"embedding": 0, "up": 1, "down": 2, "norm": 0, "head": 1}),  # a weight is tied across
    "pp2-tp2": dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
    "dp2-sp2": dict(data_parallel_size=2, sequence_parallel_size=2),
    "dp2-placed": dict(data_parallel_size=2, placement={"embedding": 0, "up": 1, "down": 0, "norm": 1, "head": 0}),
    "sp2-tp2": dict(sequence_parallel_size=2, tensor_parallel_size=2),
    "pp2-sp2": dict(pipeline_parallel_size=2, sequence_parallel_size=2, microbatches=2),
    "fsdp2": dict(data_parallel_size=2, data_parallel="fsdp"),
    "fsdp2-tp2": dict(data_parallel_size=2, tensor_parallel_size=2, data_parallel="fsdp"),
    "fsdp2-pp2": dict(data_parallel_size=2, pipeline_parallel_size=2, microbatches=2, data_parallel="fsdp"),
    "dp2-pp2-tp2": dict(data_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
}
BATCHES = 3  # in an epoch


def _ranks(sizes: dict[str, Any] | None) -> int:
    own = 2 if "schedule" in (sizes or {}) and "pipeline_parallel_size" not in (sizes or {}) else 1
    own = 1 + max((sizes or {}).get("placement", {"": own - 1}).values())
    return own * prod(size for name, size in (sizes or {}).items() if name.endswith("_size"))


RANKS = {name: _ranks(sizes) for name, sizes in LAYOUTS.items()}
STRATEGIES: dict[str, Any] = {"sp2": SequenceParallelStrategy, "placed": LayerPlacementStrategy}
STRATEGIES |= dict.fromkeys(("pp2", "pp2-whole", "pp4", "zbv", "interleaved", "dp2-pp2"), PipelineParallelStrategy)
STRATEGIES |= dict.fromkeys(("one", "tp2", "tp4", "dp2-tp2"), TensorParallelStrategy)


class Choice:
    """A class of the user's in the hyperparameters: the file then needs ``weights_only=False``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and other.name == self.name


class Model(LightningModule):
    """A language model with a tied head, a fused projection, a buffer and two param groups."""

    def __init__(self, width: int = 8, words: int = 11, choice: Any = "plain") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(words, width)
        self.up = nn.Linear(width, 20)
        self.down = nn.Linear(10, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        gate, value = self.up(h).chunk(2, -1)
        return self.head(self.norm(h + self.down(F.silu(gate) * value)))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1])

    def configure_optimizers(self) -> Any:
        matrices, others = ([p for p in self.parameters() if (p.ndim > 1) == two] for two in (True, False))
        optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.03}], 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Edits(Model):
    """Hooks that edit the checkpoint on every rank, and undo it when loading."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        del weights["head.weight"]
        weights["renamed"] = weights.pop("up.weight")
        weights["norm.weight"] = weights["norm.weight"] * 2
        checkpoint["extra"] = torch.arange(3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        weights["head.weight"] = weights["embedding.weight"]
        weights["up.weight"] = weights.pop("renamed")
        weights["norm.weight"] = weights["norm.weight"] / 2
        assert checkpoint["extra"].tolist() == [0, 1, 2]


class ManyRanks(Model):
    """Fewer words than ranks: some hold no row of the tied weight."""

    def __init__(self) -> None:
        super().__init__(words=3)


class Counts(Callback):
    """A callback with state of its own."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class SaveAtStart(Callback):
    """What was just loaded is saved again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def data(words: int = 11) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(torch.randint(0, words, (4 * BATCHES, 7), generator=generator), batch_size=4)  # type: ignore


def trainer_for(layout: str, folder: str | Path, distributed: Any = False, **options: Any) -> Trainer:
    """Every replica takes the same batches, so that each layout has the same one device to equal.

    Args:
        layout: one of `LAYOUTS`.
        folder: for what the Trainer writes.
        distributed: the strategy's `save_distributed_checkpoint`; with it one device has a strategy, too.
        options: for the Trainer.
    """
    strategy: dict[str, Any] = {}
    if (sizes := LAYOUTS[layout]) is not None or distributed:
        kind = STRATEGIES.get(layout, HybridParallelStrategy)
        strategy = dict(strategy=kind(**(sizes or {}), save_distributed_checkpoint=distributed))
    defaults: dict[str, Any] = dict(
        max_epochs=1,
        precision=None if "plugins" in options else "64-true",
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in options.get("callbacks", ())),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    return Trainer(accelerator="cpu", devices=RANKS[layout], **strategy, **{**defaults, **options})


@contextlib.contextmanager
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


MODELS: dict[str, type[Model]] = {"model": Model, "edits": Edits, "many_ranks": ManyRanks}


def _save(layout: str, path: Path, kind: str = "model", mixed: bool = False, epochs: int = 1) -> Path:
    """Train and save after the fit."""
    with quiet():
        model = MODELS[kind]().double()
        plugins: dict[str, Any] = dict(plugins=[_scaled()]) if mixed else {}
        stopping = EarlyStopping("val_loss", patience=9)
        trainer = trainer_for(layout, path.parent, max_epochs=epochs, callbacks=[Counts(), stopping], **plugins)
        words = model.hparams["words"]
        trainer.fit(model, data(words), data(words))
        trainer.save_checkpoint(path)
    return path


def _resume(layout: str, path: Path, again: Path, end: Path, kind: str = "model", mixed: bool = False) -> float:
    """Load ``path``, save it ``again`` before the first batch, train one epoch more and save the ``end``."""
    with quiet():
        model = MODELS[kind]().double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)  # what was there before must not count
        plugins: dict[str, Any] = dict(plugins=[_scaled()]) if mixed else {}
        callbacks = [Counts(), EarlyStopping("val_loss", patience=9), SaveAtStart(again)]
        trainer = trainer_for(layout, path.parent, max_epochs=2, callbacks=callbacks, **plugins)
        words = model.hparams["words"]
        trainer.fit(model, data(words), data(words), ckpt_path=path)
        trainer.save_checkpoint(end)
        return float(trainer.callback_metrics["val_loss"])


def _scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def stored(path: Path) -> int:
    """The bytes of tensors that a file holds, those that no tensor shows included."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_in(load(path))}
    return sum(storages.values())


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file that a layout writes, once."""
    folder, made = tmp_path_factory.mktemp("saved"), {}

    def get(layout: str, kind: str = "model", **options: Any) -> Path:
        key = "-".join([layout, kind, *(f"{k}={v}" for k, v in options.items())])
        if key not in made:
            pool.run(RANKS[layout], _save, layout, folder / f"{key}.ckpt", kind, **options)
            made[key] = folder / f"{key}.ckpt"
        return made[key]

    return get


@slow("tp4-*", "*-edits", "dp2-tp2-many_ranks", "dp2-tp2-model")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", ["tp2", "tp4", "dp2-tp2"])
def test_the_file_is_the_one_that_one_device_writes(layout: str, kind: str, saved: Any) -> None:
    one, other = load(saved("one", kind)), load(saved(layout, kind))
    assert not differences(one, other, 1e-9)
    for file in (one, other):
        if kind != "edits":
            weights = file["state_dict"]
            assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr(), "tied weights"
    assert all(type(x) is Tensor for x in other["state_dict"].values())
    assert stored(saved("one", kind)) == stored(saved(layout, kind)), "more than is needed"


PAIRS = [
    ("tp2", "one"), ("tp4", "one"), ("dp2-tp2", "one"), ("one", "tp2"), ("one", "tp4"), ("one", "dp2-tp2"),
    ("tp2", "tp2"), ("tp2", "tp4"), ("tp4", "dp2-tp2"),
]  # fmt: skip


@long("one-tp2-edits-False")
@slow(but=["one-tp2-edits-False", "tp2-one-model-False"])
@pytest.mark.parametrize(
    ("writer", "reader", "kind", "mixed"),
    [
        *((writer, reader, "model", False) for writer, reader in PAIRS),
        *((writer, reader, "edits", False) for writer, reader in PAIRS[:4:3]),
        *((writer, reader, "many_ranks", False) for writer, reader in PAIRS[1:5:3]),
        *((writer, reader, "model", True) for writer, reader in (("tp2", "one"), ("one", "tp2"), ("tp2", "dp2-tp2"))),
    ],
)
def test_what_one_layout_saves_another_resumes(
    writer: str, reader: str, kind: str, mixed: bool, saved: Any, pool: Pool, tmp_path: Path
) -> None:
    options = dict(mixed=True) if mixed else {}
    path = saved(writer, kind, **options)
    again, end = tmp_path / "again.ckpt", tmp_path / "end.ckpt"
    losses = pool.run(RANKS[reader], _resume, reader, path, again, end, kind, **options)
    first, second = load(path), load(again)
    same = ["state_dict", "optimizer_states", "lr_schedulers", "callbacks", "hyper_parameters"]
    for part in same + ["MixedPrecision"] * mixed:
        assert not differences(first[part], second[part], 0.0), part
    # The loops count a little on between loading and the first batch, as they do on one device.
    pool.run(1, _resume, "one", path, tmp_path / "one_again.ckpt", tmp_path / "one_end.ckpt", kind, **options)
    assert not differences(load(tmp_path / "one_again.ckpt"), second, 0.0)
    assert all(loss == losses[0] for loss in losses)
    if not mixed:
        assert not differences(load(saved("one", kind, epochs=2)), load(end), 1e-9)


# ------------------------------------------------------------------------------------------------ the ways of a Trainer


class SaveInHooks(Callback):
    """In the middle of a step, where the optimizer has stand-ins for the parameters, and between steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "before_step.ckpt")

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "batch_start.ckpt", weights_only=True)

    def on_validation_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / "validation.ckpt")


def _hooks(layout: str, folder: Path) -> None:
    with quiet():
        trainer_for(layout, folder, callbacks=[SaveInHooks(folder)]).fit(Model().double(), data(), data())


def test_hooks_may_save_at_any_time(pool: Pool, tmp_path: Path) -> None:
    folders = {layout: tmp_path / layout for layout in ("one", "tp2")}
    for layout, folder in folders.items():
        pool.run(RANKS[layout], _hooks, layout, folder)
    names = sorted(os.listdir(folders["one"]))
    assert names == sorted(os.listdir(folders["tp2"])) and len(names) == 3
    for name in names:
        one, other = (load(folder / name) for folder in folders.values())
        assert not differences(one, other, 1e-9), name
        assert ("optimizer_states" in other) == (name != "batch_start.ckpt")


def _best_and_last(layout: str, folder: Path) -> dict[str, Any]:
    with quiet():
        best = ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss", mode="max")
        slim = ModelCheckpoint(folder, "slim-{epoch}", monitor="val_loss", save_weights_only=True, save_top_k=-1)
        every = ModelCheckpoint(folder, "{epoch}", save_last=True)
        trainer = trainer_for(layout, folder, max_epochs=2, callbacks=[best, slim, every])
        trainer.fit(Model().double(), data(), data())
        found: dict[str, Any] = dict(best=Path(best.best_model_path).name, last=Path(every.last_model_path).name)
        for ckpt_path in ("best", "last", folder / "slim-epoch=0.ckpt", None):
            found[f"test {ckpt_path and Path(ckpt_path).name}"] = trainer.test(
                dataloaders=data(), ckpt_path=ckpt_path, verbose=False
            )[0]["test_loss"]
        found["predict"] = trainer.predict(dataloaders=data(), ckpt_path="best")
        trainer = trainer_for(layout, folder, max_epochs=3, callbacks=[ModelCheckpoint(folder, save_last=True)])
        trainer.fit(model := Model().double(), data(), data(), ckpt_path="last")
        found["steps"] = trainer.global_step
        found["weights"] = {name: x.clone() for name, x in model.state_dict().items()}
        return found


@long()
def test_best_and_last_load_the_same_weights_as_on_one_device(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _best_and_last, "one", tmp_path / "one")
    assert one["test best"] != one["test last"] and one["best"] == "best-epoch=0.ckpt"
    for found in pool.run(2, _best_and_last, "tp2", tmp_path / "tp2"):
        assert not differences(one, found, 1e-9)
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "tp2"))
    slim = load(tmp_path / "tp2" / "slim-epoch=0.ckpt")
    assert "optimizer_states" not in slim and "callbacks" not in slim


def _weights_only(layout: str, folder: Path, weights_only: bool | None) -> str:
    with quiet():
        path = folder / "a.ckpt"
        trainer = trainer_for(layout, folder)
        trainer.fit(Model(choice=Choice("x")).double(), data())
        trainer.save_checkpoint(path)
        try:
            trainer_for(layout, folder, max_epochs=2).fit(
                Model().double(), data(), ckpt_path=path, weights_only=weights_only
            )
        except pickle.UnpicklingError:
            return "refused"
    return "loaded"


@long("False-loaded")
@slow("True-refused")
@pytest.mark.parametrize(("weights_only", "outcome"), [(None, "refused"), (True, "refused"), (False, "loaded")])
def test_weights_only_means_what_it_does_on_one_device(
    weights_only: bool | None, outcome: str, pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(1, _weights_only, "one", tmp_path / "one", weights_only) == [outcome]
    assert pool.run(2, _weights_only, "tp2", tmp_path / "tp2", weights_only) == [outcome] * 2


def test_the_file_loads_into_a_plain_module(saved: Any) -> None:
    model = Model.load_from_checkpoint(saved("tp2"), map_location="cpu")
    assert model.hparams["words"] == 11
    assert not differences(dict(model.double().state_dict()), dict(load(saved("tp2"))["state_dict"]), 1e-7)
    assert model.head.weight is model.embedding.weight
    assert set(torch.load(saved("tp2"), weights_only=True)) == set(load(saved("one")))


class OwnIO(TorchCheckpointIO):
    """A plugin of the user's."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "own": torch.distributed.get_rank()}, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        assert checkpoint.pop("own") == 0
        return checkpoint


PLUGINS = {
    "own": lambda: OwnIO(),
    "async": lambda: AsyncCheckpointIO(),
    "async_own": lambda: AsyncCheckpointIO(OwnIO()),
}


def _plugin(name: str, path: Path) -> str:
    with quiet():
        trainer = trainer_for("tp2", path.parent, plugins=[PLUGINS[name]()], precision="64-true")
        used = type(getattr(trainer.strategy.checkpoint_io, "checkpoint_io", None)).__name__
        callbacks = [Counts(), EarlyStopping("val_loss", patience=9), SaveAtStart(path.with_name("start.ckpt"))]
        trainer.callbacks.extend(callbacks)
        model = Model().double()
        trainer.fit(model, data(), data())
        trainer.save_checkpoint(path)
        trainer.strategy.checkpoint_io.teardown()  # waits for the thread
        trainer.strategy.barrier()
        trainer = trainer_for("tp2", path.parent, plugins=[PLUGINS[name]()], precision="64-true", max_epochs=2)
        trainer.fit(Model().double(), data(), ckpt_path=path)
    return used


@slow("async", "own")
@pytest.mark.parametrize("name", PLUGINS)
def test_a_checkpoint_plugin_of_the_users_is_used(name: str, pool: Pool, tmp_path: Path, saved: Any) -> None:
    inner = pool.run(2, _plugin, name, tmp_path / "a.ckpt")
    assert inner == [{"own": "NoneType", "async": "AtomicCheckpointIO", "async_own": "OwnIO"}[name]] * 2
    written = load(tmp_path / "a.ckpt")
    assert written.pop("own", None) == (None if name == "async" else 0)
    assert not differences(load(saved("one"))["state_dict"], written["state_dict"], 1e-9)
    start = load(tmp_path / "start.ckpt")["state_dict"]
    assert not differences(dict(Model().double().state_dict()), dict(start), 0.0), "training went on while it was saved"


# ---------------------------------------------------------------------------------------------- files that do not fit


def _unfit(layout: str, folder: Path, how: str) -> str:
    """What was raised."""
    with quiet():
        checkpoint = load(folder / "good.ckpt")
        weights = checkpoint["state_dict"]
        if how == "shape":
            weights["up.weight"] = torch.zeros(24, 8)
        elif how == "part":  # as a rank's own part would look
            weights["up.weight"] = weights["up.weight"][:10]
        elif how == "missing":
            del weights["down.weight"]
        elif how == "unexpected":
            weights["stranger"] = torch.zeros(3)
        elif how == "groups":
            checkpoint["optimizer_states"][0]["param_groups"].pop()
        path = folder / f"{how}-{layout}-{os.environ['RANK']}.ckpt"
        torch.save(checkpoint, path)
        try:
            trainer_for(layout, folder, max_epochs=2).fit(Model().double(), data(), ckpt_path=path)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


@slow("part", "unexpected")
@pytest.mark.parametrize("how", ["shape", "part", "missing", "unexpected", "groups"])
def test_a_file_that_does_not_fit_is_refused_in_torchs_words_on_all_ranks(
    how: str, saved: Any, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "good.ckpt").write_bytes(saved("tp2").read_bytes())
    (one,) = pool.run(1, _unfit, "one", tmp_path, how)
    assert one
    assert pool.run(2, _unfit, "tp2", tmp_path, how) == [one, one]


class LoadsInARun(Callback):
    """Loads good and bad weights in the middle of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step != 2:
            return
        good = load(self.path)
        for how, value in {"shape": torch.zeros(24, 8), "part": torch.zeros(10, 8), "missing": None}.items():
            bad = {**good["state_dict"], "up.weight": value}
            if value is None:
                del bad["up.weight"]
            try:
                trainer.strategy.load_model_state_dict({"state_dict": bad})
            except RuntimeError as error:
                self.found[how] = str(error)
        trainer.strategy.load_model_state_dict(good)
        trainer.strategy.load_optimizer_state_dict(good)


def _load_in_a_run(layout: str, path: Path, end: Path) -> dict[str, Any]:
    with quiet():
        loads = LoadsInARun(path)
        trainer = trainer_for(layout, path.parent, callbacks=[loads])
        trainer.fit(Model().double(), data())
        trainer.save_checkpoint(end)
    return loads.found


def test_weights_and_optimizers_load_in_the_middle_of_a_run(saved: Any, pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _load_in_a_run, "one", saved("tp2"), tmp_path / "one.ckpt")
    assert list(one) == ["shape", "part", "missing"]
    for ranks, layout in ((2, "tp2"), (4, "dp2-tp2")):
        for found in pool.run(ranks, _load_in_a_run, layout, saved("tp2"), tmp_path / f"{layout}.ckpt"):
            assert found == one
        a, b = load(tmp_path / "one.ckpt"), load(tmp_path / f"{layout}.ckpt")
        for part in ("state_dict", "optimizer_states"):
            assert not differences(a[part], b[part], 1e-9)


# ------------------------------------------------------------------------------------------------------ after a failure


class Breaks(Model):
    """Raises in the third batch, on the ranks told."""

    ranks: tuple[int, ...] = ()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank in self.ranks:
            raise ValueError(f"rank {self.trainer.global_rank} broke")
        return super().training_step(batch, batch_idx)


def _break(layout: str, folder: Path, ranks: tuple[int, ...], kind: str) -> tuple[str, list[str]]:
    model = Breaks().double()
    model.ranks = ranks
    callback = {
        "exception_only": lambda: ModelCheckpoint(folder, "{step}", save_on_exception=True),
        "on_exception": lambda: OnExceptionCheckpoint(folder),
    }[kind]()
    trainer = trainer_for(layout, folder, callbacks=[callback])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, data())
        except BaseException as error:
            said = [str(w.message) for w in caught if "checkpoint" in str(w.message)]
            return f"{type(error).__name__}: {str(error)[:40]}", said
    raise AssertionError("nothing broke")


@pytest.mark.parametrize("kind", ["exception_only", "on_exception"])
def test_a_checkpoint_is_saved_when_all_ranks_fail_alike(kind: str, pool: Pool, tmp_path: Path) -> None:
    for layout in ("one", "tp2"):
        answers = pool.run(RANKS[layout], _break, layout, tmp_path / layout, (0, 1), kind)
        assert [error for error, _ in answers] == [f"ValueError: rank {i} broke" for i in range(RANKS[layout])]
    names = os.listdir(tmp_path / "one")
    assert names == os.listdir(tmp_path / "tp2") and len(names) == 1
    a, b = (load(tmp_path / layout / names[0]) for layout in ("one", "tp2"))
    assert a["global_step"] == 2
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert not differences(a[part], b[part], 1e-9)


@slow(but=["on_exception-1"])
@pytest.mark.parametrize(("kind", "rank"), [("exception_only", 0), ("on_exception", 1)])
def test_no_checkpoint_is_waited_for_when_one_rank_fails(kind: str, rank: int, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        pool.run(2, _raise_alone, tmp_path, rank, kind, until=rank)
    report = caught.value.reports[rank]
    assert f"ValueError: rank {rank} broke" in report
    assert "since every rank holds a part of it and not all of the 2 ranks came within 1 s" in report
    assert not os.listdir(tmp_path)


def _raise_alone(folder: Path, rank: int, kind: str) -> None:
    with mock.patch.object(end_of_run, "PATIENCE", timedelta(seconds=1)):
        error, said = _break("tp2", folder, (rank,), kind)
    raise RuntimeError(f"{error}\n{said}")
