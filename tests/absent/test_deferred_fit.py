"""Modules whose layers are built in `configure_model`: no rank holds more than its part, and all weights are right."""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_par
from lightning_par.absent.deferred import op_recorder
from lightning_par.absent.deferred.deferred_tensor import is_deferred
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.checkpoint.reading import StoredCheckpoint
from lightning_par.mesh.ledger import ledger
from lightning_par.private.storage import trim_memory
from lightning_par.sharded import aliases
from lightning_par.sharded.tensor import leaf
from tests.helpers import equality
from tests.helpers.configured import configured
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.process_memory import anonymous, watched
from tests.helpers.slow import long, slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2, microbatches=2),
    "dp2": dict(tensor_parallel_size=1, data_parallel_size=2),
    "fsdp2": dict(data_parallel_size=2, data_parallel="fsdp"),
}
CASES = "mlp gpt lstm vit hf_llama hf_gpt2 hf_bert hf_t5".split()
QUIET: dict[str, Any] = dict(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
)  # fmt: skip


def _strategy(layout: dict[str, Any]) -> Any:
    if "data_parallel" in layout or "sequence_parallel_size" in layout:
        return lightning_par.HybridParallelStrategy(**layout)
    pipelined = "pipeline_parallel_size" in layout
    kind = lightning_par.PipelineParallelStrategy if pipelined else lightning_par.TensorParallelStrategy
    return kind(**layout)


class Counting(Callback):
    """What there is when `configure_model` is done, and what training starts from."""

    def __init__(self) -> None:
        self.deferred = 0
        self.initial: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert not any(is_deferred(leaf(x)) for x in (*pl_module.parameters(), *pl_module.buffers()))
        self.initial = {name: x.clone() for name, x in trainer.strategy.lightning_module_state_dict().items()}


def _fit(module: LightningModule, batches: Any, layout: dict[str, Any] | None, seed: int, **options: Any) -> Any:
    """The weights that training starts from, how many parameters were deferred, and the warnings."""
    op_recorder.SMALL = 0
    keep = Counting()
    configure = module.configure_model

    def configure_and_count() -> None:
        configure()
        keep.deferred = sum(map(is_deferred, module.parameters()))

    module.configure_model = configure_and_count  # type: ignore[method-assign]
    where = dict(devices=1) if layout is None else dict(devices=2, strategy=_strategy(layout))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(seed)
        trainer = Trainer(callbacks=[keep], limit_train_batches=1, **{**QUIET, **where, **options})  # type: ignore[arg-type]
        trainer.fit(module, batches, ckpt_path=options.get("ckpt_path"))
    told = [str(warning.message) for warning in caught if "built whole" in str(warning.message)]
    return keep.initial, keep.deferred, told, {name: x.clone() for name, x in module.state_dict().items()}


def _start(case: str, layout: dict[str, Any] | None, rank_seed: bool) -> Any:
    loader = DataLoader(MODELS[case].data(0), batch_size=MODELS[case].batch_size)  # type: ignore[arg-type]
    module = configured(MODELS[case].module)
    rank = int(os.environ.get("RANK", "0")) if rank_seed else 0
    return _fit(module, loader, layout, 7 + rank)


@functools.cache
def _one_device(pool: Pool, case: str) -> dict[str, Tensor]:
    return pool.run(1, _start, case, None, False)[0][0]


@long("tp2-hf_bert")
@slow(but=["tp2-hf_bert", "fsdp2-hf_llama", "fsdp2-mlp"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_those_of_one_device(pool: Pool, case: str, layout: str) -> None:
    expected = _one_device(pool, case)
    first, second = pool.run(2, _start, case, LAYOUTS[layout], True)
    assert all((count > 0) == (layout != "dp2") for _, count, *_ in (first, second))
    assert first[0].keys() == expected.keys() and not first[2]
    for name, x in expected.items():
        assert torch.equal(x, first[0][name]), name


def _start_beside_a_copy() -> Any:
    kept = torch.zeros(4)
    copy = kept[:2].clone()  # which an earlier run of this process may have left
    aliases.note("select", kept, copy, lambda x: x[:2], lambda x, part: x[:2].copy_(part))
    return _start("mlp", LAYOUTS["tp2"], True), copy


def test_what_an_earlier_run_left_does_not_ask_for_memory_of_deferred_weights(pool: Pool) -> None:
    for (_, count, *_), _ in pool.run(2, _start_beside_a_copy):
        assert count > 0


def _messages(make: Any) -> Counter[tuple[str, str, str]]:
    op_recorder.SMALL = 0
    loader = DataLoader(MODELS["gpt"].data(0), batch_size=MODELS["gpt"].batch_size)  # type: ignore[arg-type]
    with ledger() as moved:
        strategy = _strategy(LAYOUTS["fsdp2"])
        trainer = Trainer(devices=2, strategy=strategy, limit_train_batches=2, **QUIET)
        trainer.fit(make(MODELS["gpt"].module), loader)
    return Counter({key: n for key, n in moved.counts().items() if key[1] == "parameters"})


def test_weights_travel_in_as_few_messages_as_real_ones(pool: Pool) -> None:
    real, deferred = (pool.run(2, _messages, make)[0] for make in (_built, configured))
    assert real == deferred and {verb for *_, verb in real} == {"all_gather", "reduce_scatter"}


def _built(make: Any) -> LightningModule:
    return make()  # type: ignore[no-any-return]


def _train(case: str, layout: dict[str, Any] | None, folder: str | None, precision: str) -> equality.Result:
    op_recorder.SMALL = 0
    return equality.run(case, layout, folder, precision, in_configure_model=True)


@long()
@slow("pp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_training_is_that_of_one_device(pool: Pool, tmp_path: Path, layout: str) -> None:
    reference = pool.run(1, _train, "gpt_tied", None, None, "64-true")[0]
    for result in pool.run(2, _train, "gpt_tied", LAYOUTS[layout], str(tmp_path), "64-true"):
        assert equality.compare(reference, result) == []


# -------------------------------------------------------------------------------------------------- what is not torch's


class Points(LightningModule):
    """A small regression whose layers ``make`` builds in `configure_model`."""

    make: Any = staticmethod(lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)))

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        return (self.net(batch) - batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batches() -> Any:
    return DataLoader(torch.linspace(-1, 1, 48).view(8, 6), batch_size=4)  # type: ignore[arg-type]


def _touches_memory() -> nn.Module:
    net = Points.make()
    net[0].weight.detach().numpy()[:, 0] = 0.5
    return net


def _unseeded() -> nn.Module:
    """Every rank draws another weight from a generator that nothing seeds, and its share of a bias."""
    net = Points.make()
    with torch.no_grad():
        net[0].weight.copy_(torch.from_numpy(np.random.default_rng().standard_normal((16, 6))))
        if torch.distributed.is_initialized():
            net[0].bias.fill_(torch.distributed.get_rank())
    return net


def _large_data() -> nn.Module:
    net = Points.make()
    net.table = nn.Parameter(torch.from_numpy(np.random.RandomState(1).standard_normal((500, 600))).float())
    return net


def _made_by(make: Any, layout: dict[str, Any] | None, seed: int = 7) -> Any:
    module = Points()
    module.make = make
    return _fit(module, _batches(), layout, seed)


@slow("tp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_constructor_that_cannot_be_deferred_builds_whole_and_says_so(pool: Pool, layout: str) -> None:
    expected = pool.run(1, _made_by, _touches_memory, None)[0]
    first, second = pool.run(2, _made_by, _touches_memory, LAYOUTS[layout])
    assert first[1] == second[1] == 0
    assert len(first[2]) == 1 and "The model was built whole on every rank, since numpy would share" in first[2][0]
    assert "test_deferred_fit.py" in first[2][0] and not second[2]
    assert all(torch.equal(x, first[0][name]) for name, x in expected[0].items())


def test_large_weights_made_of_data_are_built_whole_and_said_so(pool: Pool) -> None:
    expected = pool.run(1, _made_by, _large_data, None)[0]
    first, _ = pool.run(2, _made_by, _large_data, LAYOUTS["tp2"])
    assert first[1] == 4 and "net.table (1.2 MB) were built whole on every rank" in first[2][0]
    assert all(torch.equal(x, first[0][name]) for name, x in expected[0].items())


@slow("tp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_ranks_that_draw_otherwise_start_from_the_first_ones_weights(pool: Pool, layout: str) -> None:
    (initial, deferred, _, one), (*_, other) = pool.run(2, _made_by, _unseeded, LAYOUTS[layout])
    assert deferred == 4 and torch.equal(initial["net.0.bias"], torch.zeros(16))
    assert all(torch.equal(x, other[name]) for name, x in one.items())


# -------------------------------------------------------------------------------------------- checkpoints, entry points


def _saved(path: str) -> None:
    torch.manual_seed(21)
    trainer = Trainer(devices=1, **{**QUIET, "logger": False})
    trainer.fit(Points(), _batches())
    trainer.save_checkpoint(path)


def _fit_from(path: str, layout: dict[str, Any] | None) -> Any:
    op_recorder.SMALL = 0
    keep = Counting()
    where = dict(devices=1) if layout is None else dict(devices=2, strategy=_strategy(layout))
    torch.manual_seed(7)
    module = Points()
    trainer = Trainer(callbacks=[keep], **{**QUIET, **where, "max_epochs": 2})  # type: ignore[arg-type]
    trainer.fit(module, _batches(), ckpt_path=path)
    return keep.initial, {name: x.clone() for name, x in module.state_dict().items()}


@slow("tp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_checkpoint_takes_the_place_of_deferred_weights(pool: Pool, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "one.ckpt")
    pool.run(1, _saved, path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    _, expected = pool.run(1, _fit_from, path, None)[0]
    initial, after = pool.run(2, _fit_from, path, LAYOUTS[layout])[0]
    assert all(torch.equal(x, initial[name]) for name, x in saved.items())
    assert all(torch.allclose(x, after[name], rtol=1e-5, atol=1e-6) for name, x in expected.items())


class Reads(Callback):
    """What of a checkpoint this rank reads until its weights are there, and what it keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries = self.times = self.kept = 0
        plain = StoredCheckpoint.copy_into

        def counted(source: Any, target: Tensor, dim: int = 0, indices: Any = None) -> None:
            self.entries += target.numel()
            self.times += 1
            plain(source, target, dim, indices)

        monkeypatch.setattr(StoredCheckpoint, "copy_into", counted)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.weights = checkpoint["state_dict"].values()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = sum(x.is_kept for x in self.weights)
        own = [leaf(x) for x in pl_module.parameters() if not is_elsewhere(x)]
        self.own_entries, self.own_times = sum(x.numel() for x in own), len(own)


def _fit_from_directory(path: str, layout: dict[str, Any]) -> Any:
    op_recorder.SMALL = 0
    trainer = Trainer(devices=2, strategy=_strategy({**layout, "save_distributed_checkpoint": True}), **QUIET)
    module = Points()
    trainer.fit(module, _batches())
    trainer.save_checkpoint(path)
    saved = {name: x.clone() for name, x in module.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        keep, reads = Counting(), Reads(patch)
        options: dict[str, Any] = {**QUIET, "max_epochs": 2}
        trainer = Trainer(devices=2, strategy=_strategy(layout), callbacks=[reads, keep], **options)
        trainer.fit(Points(), _batches(), ckpt_path=path)
    if trainer.is_global_zero:  # which has all of it
        assert all(torch.equal(x, keep.initial[name]) for name, x in saved.items())
    return reads.entries, reads.times, reads.kept, reads.own_entries, reads.own_times


@slow("tp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_of_a_directory_each_rank_reads_its_part_once_and_keeps_nothing(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    for found in pool.run(2, _fit_from_directory, str(tmp_path / "last.ckpt"), LAYOUTS[layout]):
        entries, times, kept, own_entries, own_times = found
        assert kept == 0 and (entries, times) == (own_entries, own_times)


def _validated(layout: dict[str, Any] | None) -> Any:
    op_recorder.SMALL = 0
    where = dict(devices=1) if layout is None else dict(devices=2, strategy=_strategy(layout))
    torch.manual_seed(7)
    module = Points()
    trainer = Trainer(**{**QUIET, **where, "limit_val_batches": 2, "precision": "64-true"})  # type: ignore[arg-type]
    first = trainer.validate(module, _batches(), verbose=False)
    return first, trainer.validate(module, _batches(), verbose=False)


@slow("tp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_validation_alone_runs_a_deferred_module_and_again(pool: Pool, layout: str) -> None:
    expected = pool.run(1, _validated, None)[0]
    for seen in pool.run(2, _validated, LAYOUTS[layout]):
        for one, other in zip(expected, seen, strict=True):
            assert other[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-12)


# --------------------------------------------------------------------------------------------------------------- memory


class Wide(Points):
    """``layers`` blocks of two matrices."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.layers = width, layers

    def make(self) -> nn.Module:  # type: ignore[override]
        def block() -> list[nn.Module]:
            return [nn.Linear(self.width, 2 * self.width), nn.ReLU(), nn.Linear(2 * self.width, self.width)]

        return nn.Sequential(*(layer for _ in range(self.layers) for layer in block()))


SHARES: dict[str, int] = {"tp2": 2, "pp2": 2, "fsdp2": 2, "sp2": 1, "pp2-fsdp2": 4}  # in how many weights are cut
MEMORY = {
    **LAYOUTS,
    "sp2": dict(sequence_parallel_size=2),
    "pp2-fsdp2": {**LAYOUTS["pp2"], **LAYOUTS["fsdp2"]},
}


class Measuring(Callback):
    """The most anonymous memory from before `configure_model` until optimizers exist, beyond what there was."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.start = anonymous()
        self.watch = watched()
        self.peaks = self.watch.__enter__()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.__exit__(None, None, None)
        self.peak = self.peaks["self"] - self.start
        parameters = list(pl_module.parameters())
        self.own = sum(leaf(p).nbytes for p in parameters if not is_elsewhere(p))
        self.largest = max(p.numel() * p.element_size() for p in parameters)
        self.whole = sum(p.numel() * p.element_size() for p in parameters)
        raise KeyboardInterrupt  # all is seen, and a step would take its time


def _measured(width: int, layers: int, layout: str) -> tuple[int, ...]:
    if width > 16:
        _measured(16, 2, layout)  # imports what planning needs
        gc.collect()
        trim_memory()
    measuring = Measuring()
    strategy = _strategy(MEMORY[layout])
    trainer = Trainer(devices=max(2, SHARES[layout]), strategy=strategy, callbacks=[measuring], **QUIET)
    with pytest.raises(SystemExit):
        trainer.fit(Wide(width, layers), DataLoader(torch.ones(4, 2, width), batch_size=4))  # type: ignore[arg-type]
    return measuring.peak, measuring.own, measuring.largest, measuring.whole


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    """Memory that earlier tests gave up would hide what is taken."""
    started = Pool()
    yield started
    started.close()


def _hold_their_part(pool: Pool, layout: str, width: int, layers: int) -> None:
    ranks = max(2, SHARES[layout])
    for rank, found in enumerate(pool.run(ranks, _measured, width, layers, layout, timeout=width / 5)):
        peak, own, largest, whole = found
        print(f"build {layout}, rank {rank}: {peak / (own + largest):.3f} of {own} + {largest} bytes")
        assert own <= 1.02 * whole / SHARES[layout]
        assert peak <= 1.1 * (own + largest)


@slow()
@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2"])
def test_no_rank_holds_more_than_its_own_part_and_one_tensor(fresh: Pool, layout: str) -> None:
    _hold_their_part(fresh, layout, 1024, 16)  # 0.27 GB in all


@slow()
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", SHARES)
def test_no_rank_holds_more_at_a_gigabyte_a_rank(fresh: Pool, layout: str) -> None:
    _hold_their_part(fresh, layout, 2048, 16 * SHARES[layout])
