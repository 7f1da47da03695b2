"""Torch, Lightning and Python are after a run what they were before it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_par import HybridParallelStrategy
from lightning_par.sharded.tensor import ShardedTensor, full
from tests.helpers.globals_of_torch import attributes, differences
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, loader

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "shard_residual": dict(tensor_parallel_size=2, shard_residual=True),
    "pipeline": dict(pipeline_parallel_size=2),
    "sequence": dict(sequence_parallel_size=2),
    "placement": dict(placement="balanced", pipeline_parallel_size=2),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
    "data": dict(data_parallel_size=2),
}
APPLY = "tables.codes of torch.autograd.Function.apply"
BACKWARD = "tables.codes of torch.autograd.backward"  # whose name may have been imported
KEPT: list[Tensor] = []


def _trainer(strategy: Any, *callbacks: Callback) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=2, precision="64-true", strategy=strategy, callbacks=[*callbacks], max_steps=2,
        limit_val_batches=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


class Watch(Callback):
    """What is changed while a run trains, after its last batch: to look through all of torch takes long."""

    def __init__(self, before: Any) -> None:
        self.before, self.changed = before, list[str]()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.changed = differences(self.before, attributes())


class Ends(Callback):
    """Ends the run by an exception, within a step or after it."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise ZeroDivisionError


def _before() -> Any:
    """Before any strategy of ours; a run of Lightning's own fills caches, and changes a few things for ever."""
    _trainer("ddp").fit(Net(), loader(), loader())
    gc.collect()
    return attributes()


def _left(before: Any) -> list[str]:
    gc.collect()
    return differences(before, attributes())


def _fit(layout: dict[str, Any]) -> Any:
    before = _before()
    watch = Watch(before)
    trainer = _trainer(HybridParallelStrategy(**layout), watch)
    module = Net()
    trainer.fit(module, loader(), loader())
    first = _left(before)
    trainer.fit_loop.epoch_loop.max_steps = 4  # the same objects once more
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    return watch.changed, first, _left(before)


@pytest.fixture(scope="module")
def fresh(pool: Pool) -> Iterator[Pool]:
    """Ranks in which nothing has run but these tests, each of which shows that it leaves nothing to the next."""
    pool.restart()
    yield pool
    pool.restart()


@slow(but=["fsdp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_run_everything_is_as_before(fresh: Pool, layout: str) -> None:
    for meanwhile, after_fit, after_all in fresh.run(2, _fit, LAYOUTS[layout]):
        assert (APPLY in meanwhile) == (layout != "data")
        assert (BACKWARD in meanwhile) == (layout not in ("tensor", "pipeline", "placement"))
        assert after_fit == after_all == []


class Nested(Callback):
    """Runs another Trainer within a run, and looks at what is changed then."""

    def __init__(self, before: Any, inner: Trainer) -> None:
        self.before, self.inner, self.changed = before, inner, list[str]()

    def on_train_start(self, *args: Any) -> None:
        self.inner.fit(Net(), loader(), loader())
        self.changed = differences(self.before, attributes())


def _fit_within(outer: dict[str, Any], inner: dict[str, Any]) -> Any:
    before = _before()
    nested = Nested(before, _trainer(HybridParallelStrategy(**inner)))
    _trainer(HybridParallelStrategy(**outer), nested).fit(Net(), loader(), loader())
    return nested.changed, _left(before)


@slow()
def test_the_last_of_two_runs_undoes(fresh: Pool) -> None:
    for outer, inner in (("tensor", "fsdp"), ("data", "tensor")):
        for meanwhile, after in fresh.run(2, _fit_within, LAYOUTS[outer], LAYOUTS[inner]):
            assert (APPLY if outer == "tensor" else BACKWARD) in meanwhile
            assert after == []


def _fit_that_fails(layout: dict[str, Any], again: bool) -> Any:
    before = _before()
    module, trainer = Net(), _trainer(HybridParallelStrategy(**layout), Ends())
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(module, loader(), loader())
    failed = _left(before)
    if again:
        trainer = _trainer(HybridParallelStrategy(**layout))
        trainer.fit(module, loader(), loader())
    else:
        del module, trainer
    return failed, _left(before)


@slow(but=["fsdp-thrown away"])
@pytest.mark.parametrize("again", [False, True], ids=["thrown away", "run again"])
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "fsdp", "data"])
def test_after_an_exception_until_nothing_is_in_parts(fresh: Pool, layout: str, again: bool) -> None:
    for failed, after in fresh.run(2, _fit_that_fails, LAYOUTS[layout], again):
        assert (APPLY in failed) == (layout != "data")
        assert after == []


class Keeps(Net):
    """Keeps what it computes where no strategy looks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        KEPT.append(self.net[0](batch[0]))
        return super().training_step(batch, batch_idx)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def _fit_that_keeps() -> Any:
    before = _before()
    _trainer(HybridParallelStrategy(tensor_parallel_size=2)).fit(Keeps(), loader(), loader())
    kept = [type(x) is ShardedTensor for x in KEPT], _left(before)
    derived = next(x for x in KEPT if type(x) is ShardedTensor).detach() * 2
    derived.requires_grad_()
    doubled = full(Doubled.apply(derived))
    doubled.sum().backward()  # type: ignore[no-untyped-call]
    assert derived.grad is not None
    whole = torch.equal(doubled, full(derived) * 2) and bool((full(derived.grad) == 2).all())
    del doubled
    KEPT.clear()
    held = _left(before)
    del derived
    return *kept, whole, held, _left(before)


@long()
def test_a_sharded_tensor_that_is_kept_works_as_long_as_it_is(fresh: Pool) -> None:
    for sharded, kept, whole, derived, after in fresh.run(2, _fit_that_keeps):
        assert any(sharded) and whole
        assert APPLY in kept and APPLY in derived and after == []


class Patches(Callback):
    """A user's own change of the same functions, for good."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_start(self, *args: Any) -> None:
        self.plain = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.plain(*args, **kwargs)

        torch.autograd.backward = self.backward = backward


def _fit_with_a_patch(layout: dict[str, Any]) -> Any:
    before = _before()
    patches, module = Patches(), Net()
    _trainer(HybridParallelStrategy(**layout), patches).fit(module, loader(), loader())
    stays, left, calls = torch.autograd.backward is patches.backward, _left(before), patches.calls
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()  # type: ignore[no-untyped-call]
    works = x.grad is not None and x.grad.tolist() == [1, 1] and patches.calls == calls + 1
    watch = Watch(before)
    _trainer(HybridParallelStrategy(**layout), watch).fit(Net(), loader(), loader())
    stays = stays and torch.autograd.backward is patches.backward and patches.calls > calls + 1
    torch.autograd.backward = patches.plain  # ours, which is off
    _trainer(HybridParallelStrategy(**layout)).fit(Net(), loader(), loader())
    weights = {name: x.detach().numpy() for name, x in module.named_parameters()}
    return stays, works, left, watch.changed, _left(before), weights


@long()
def test_what_the_user_changed_meanwhile_stays(fresh: Pool) -> None:
    plain = fresh.run(2, _weights, LAYOUTS["sequence"])
    for rank, (stays, works, left, meanwhile, after, weights) in enumerate(
        fresh.run(2, _fit_with_a_patch, LAYOUTS["sequence"])
    ):
        assert stays and works and left == [BACKWARD, "torch.autograd.backward"] and APPLY in meanwhile and after == []
        assert all((weights[name] == x).all() for name, x in plain[rank].items())


def _weights(layout: dict[str, Any]) -> Any:
    module = Net()
    _trainer(HybridParallelStrategy(**layout)).fit(module, loader(), loader())
    return {name: x.detach().numpy() for name, x in module.named_parameters()}
