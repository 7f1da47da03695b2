"""``data_parallel="fsdp"``: results are one device's, each rank stores its part, weights move no more than needed."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ledger
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.fsdp.stored_parameter import Stored, composed
from lightning_par.mesh import handshake
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.tensor import leaf
from tests.helpers import equality
from tests.helpers.equality import Result
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.law.test_equality import one_device as one_device  # a fixture
from tests.law.test_hybrid_equality import GPT, PP_SP, PP_TP, SP_TP

DP = dict(data_parallel_size=2, data_parallel="fsdp")
PP = dict(pipeline_parallel_size=2, microbatches=2)

ROWS: list[Any] = [
    # weights used by several modules, by functions, in loops, twice in backward, frozen, by their values
    *((case, DP, {}) for case in ("gpt_tied", "mlp_functional", "lstm_cell", "lstm", "unet", "gpt_checkpointed")),
    *((case, DP, {}) for case in ("gpt_lora", "mlp_l2", "hf_llama")),
    ("gpt", DP | dict(data_parallel_size=4), {}),
    ("gpt_tied", DP, dict(accumulate=2)),
    ("mlp_odd", DP | dict(data_parallel_size=4), dict(clip=0.001, clip_algorithm="value")),
    ("hf_t5", DP | dict(tensor_parallel_size=2), {}),
    ("gpt_5_heads", DP | dict(tensor_parallel_size=2), {}),
    ("gpt_own_clip", DP | dict(data_parallel_size=1, sequence_parallel_size=2), {}),
    ("loss_ignore", DP | dict(sequence_parallel_size=2), {}),
    ("gpt_tied", DP | SP_TP, {}),
    ("gpt_tied", DP | PP | dict(schedule="zbv"), {}),
    ("unet", DP | PP | dict(schedule="interleaved_zero_bubble"), {}),
    ("loss_accuracy", DP | PP, dict(accumulate=2)),
    ("hf_t5", DP | PP_TP, {}),
    ("loss_accuracy", DP | PP_SP, {}),
    ("gpt_tied", DP | PP | dict(placement=GPT), {}),
    # gathered again for backward, or not
    ("gpt_tied", DP | dict(reshard_after_forward=False), dict(accumulate=2)),
    ("gpt_tied", DP | PP | dict(reshard_after_forward=True), dict(accumulate=2)),
    ("gpt_checkpointed", DP | PP | dict(schedule="zbv", reshard_after_forward=True), {}),
    ("gpt_tied", DP | PP_TP | dict(reshard_after_forward=True), {}),
    ("mlp_l2", DP | PP | dict(reshard_after_forward=True), {}),  # whose last stage takes other stages' weights
    # each of the tensor ranks has a share of the gradients of weights that are not split
    ("gpt_tied", DP | dict(tensor_parallel_size=2, shard_residual=True), dict(accumulate=2)),
    ("gpt", DP | PP_TP | dict(shard_residual=True), {}),
    ("hf_llama", DP | dict(tensor_parallel_size=2, shard_residual=True, reshard_after_forward=False), {}),
]


def _name(row: Any) -> str:
    sizes = (f"{name.split('_')[0]}={value}" for name, value in row[1].items() if isinstance(value, int | str))
    return "-".join([row[0], *sizes, *(f"{name}={value}" for name, value in row[2].items())])


def _train(pool: Pool, case: str, layout: dict[str, Any], folder: Path, **options: Any) -> list[Result]:
    ranks = prod(size for name, size in layout.items() if name.endswith("_size"))
    return pool.run(
        ranks, equality.run, case, layout=dict(layout, hybrid=True), folder=str(folder),
        data_size=layout["data_parallel_size"], **options,
    )  # fmt: skip


@slow(but=["gpt_checkpointed-data=2-data=fsdp", "mlp_functional-data=2-data=fsdp"])
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_storing_parts_never_changes_results(
    row: Any, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    case, layout, options = row
    results = _train(pool, case, layout, tmp_path, **options)
    copies = layout["data_parallel_size"]
    reference = one_device(case, data_size=copies, **options)
    lines = [f"rank {i}: {line}" for i, one in enumerate(results) for line in equality.compare(reference, one, copies)]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"


@slow()
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_in_low_precision_it_errs_at_most_twice_as_much_as_one_device(
    precision: str, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    layout, options = DP | dict(tensor_parallel_size=2), dict(data_size=2, eps=0.01)
    results = _train(pool, "gpt", layout, tmp_path, precision=precision, eps=0.01)
    single, exact = one_device("gpt", precision=precision, **options), one_device("gpt", **options)
    lines = [line for one in results for line in equality.compare_low(exact, single, one, 2)]
    assert not lines, "\n" + "\n".join(lines)


# ------------------------------------------------------------------------------------------- what is stored, what moves

WIDTH, LAYERS = 32, 4


class Layers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.scale = nn.Parameter(torch.ones(1))  # too short to be stored in parts
        self.kept: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + torch.tanh(layer(batch))
        return (self.scale * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Books(Callback):
    """What this rank stores at the end of a step, and what moved in the second one."""

    def __init__(self) -> None:
        self.moved: Any = None
        self.stored: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._open = ledger()
            self.moved = self._open.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._open.__exit__(None, None, None)
            held = [p for p in pl_module.parameters() if isinstance(p, Stored)]
            (optimizer,) = trainer.optimizers
            states = [state for p, state in optimizer.state.items() if isinstance(p, Stored)]
            self.stored = dict(
                weights=sum(leaf(p).untyped_storage().nbytes() for p in held),
                gradients=sum(g.numel() * 8 for g in (leaf(p).grad for p in held) if g is not None),
                moments=sum(leaf(state["exp_avg"]).numel() * 8 for state in states),
            )


def _run(layout: dict[str, Any], precision: Any = "64-true") -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    torch.manual_seed(0)
    books = Books()
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=HybridParallelStrategy(**layout),
        max_steps=2, precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[books],
    )  # fmt: skip
    trainer.fit(Layers(), DataLoader(torch.randn(16, WIDTH), batch_size=4))
    return books.stored, [(t.verb, t.purpose, t.nbytes) for t in books.moved.transfers if t.axis == "data"]


WEIGHT, BIAS = WIDTH * WIDTH * 8, WIDTH * 8
FLAGS = 2 * 2 * 8  # of two weights, whether they have gradients, to each of two ranks


def test_a_rank_stores_its_part_and_gathers_a_weight_twice(pool: Pool) -> None:
    for stored, moved in pool.run(2, _run, DP):
        part = LAYERS * (WEIGHT + BIAS) // 2
        assert stored == dict(weights=part, gradients=part, moments=part)
        gathers = sorted(size for verb, purpose, size in moved if (verb, purpose) == ("all_gather", "parameters"))
        # For forward, and those that backward needs again: the first layer's input wants no gradient, and the last
        # layer's weights stay, since backward begins with them.
        assert gathers == [WEIGHT + BIAS] * (LAYERS + LAYERS - 2)
        scatters = sorted(size for verb, purpose, size in moved if (verb, purpose) == ("reduce_scatter", "parameters"))
        assert scatters == [WEIGHT + BIAS + FLAGS] * LAYERS


def test_under_autocast_weights_travel_in_low_precision_and_gradients_in_their_own(pool: Pool) -> None:
    for _, moved in pool.run(2, _run, DP, "bf16-mixed"):
        gathers = sorted(size for verb, purpose, size in moved if (verb, purpose) == ("all_gather", "parameters"))
        # Those for backward show that autocast's copies were not kept.
        assert gathers == [(WEIGHT + BIAS) // 4] * (LAYERS + LAYERS - 2)
        scatters = sorted(size for verb, purpose, size in moved if (verb, purpose) == ("reduce_scatter", "parameters"))
        assert scatters == [(WEIGHT + BIAS + FLAGS) // 2] * LAYERS


@long()
def test_in_a_pipeline_nothing_is_gathered_again_between_microbatches(pool: Pool) -> None:
    for stored, moved in pool.run(4, _run, DP | PP | dict(microbatches=4)):
        part = LAYERS // 2 * (WEIGHT + BIAS) // 2
        assert stored == dict(weights=part, gradients=part, moments=part)
        for verb in ("all_gather", "reduce_scatter"):  # all of them in one message
            sizes = [size for v, purpose, size in moved if (v, purpose) == (verb, "parameters")]
            assert sizes == [(BIAS + WEIGHT) * (LAYERS // 2)]


def test_weights_stay_gathered_for_backward_where_asked(pool: Pool) -> None:
    for _, moved in pool.run(2, _run, DP | dict(reshard_after_forward=False)):
        for verb, flags in (("all_gather", 0), ("reduce_scatter", FLAGS)):
            sizes = [size for v, purpose, size in moved if (v, purpose) == (verb, "parameters")]
            assert sizes == [WEIGHT + BIAS + flags] * LAYERS


def test_in_a_pipeline_each_microbatch_gathers_weights_where_asked(pool: Pool) -> None:
    asked = DP | PP | dict(microbatches=4, reshard_after_forward=True)
    for rank, (_, moved) in enumerate(pool.run(4, _run, asked)):
        again = LAYERS // 2 - (rank in FIRST_STAGE)  # the first layer's input wants no gradient
        gathers = sorted(size for verb, purpose, size in moved if (verb, purpose) == ("all_gather", "parameters"))
        assert gathers == [WEIGHT + BIAS] * (LAYERS // 2 + again) * 4
        scatters = sorted(size for verb, purpose, size in moved if (verb, purpose) == ("reduce_scatter", "parameters"))
        assert scatters == [WEIGHT + BIAS + FLAGS] * (LAYERS // 2) * 4


FIRST_STAGE = (0, 2)  # of two replicas


class Uneven(torch.utils.data.Sampler[int]):
    """One replica's batches have four samples, the other's one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]] if self.rank < 2 else [[8], [9]])

    def __len__(self) -> int:
        return 2


def _uneven(layout: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = Layers()
    data = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(data, batch_sampler=Uneven(int(os.environ["RANK"])))  # type: ignore[arg-type]
    _trainer(layout, use_distributed_sampler=False).fit(module, loader)
    return [p.detach().clone() for p in module.parameters()]


@long()
def test_replicas_with_other_numbers_of_microbatches_are_refused_only_where_each_gathers(pool: Pool) -> None:
    expected = pool.run(4, _uneven, dict(data_parallel_size=2, pipeline_parallel_size=2, microbatches=2))
    torch.testing.assert_close(pool.run(4, _uneven, DP | PP), expected, rtol=1e-11, atol=1e-13)
    with pytest.raises(RanksFailedError, match="into 1 microbatches, another into 2"):
        pool.run(4, _uneven, DP | PP | dict(reshard_after_forward=True))


def _ragged(layout: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = Layers()
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=HybridParallelStrategy(**layout),
        max_epochs=2, precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = torch.randn(22, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data[:6], batch_size=2))
    return [p.detach().clone() for p in module.parameters()]


def test_in_a_pipeline_batches_may_differ_in_size(pool: Pool) -> None:
    expected = pool.run(2, _ragged, dict(data_parallel_size=2))[0]
    for found in pool.run(4, _ragged, DP | PP):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


# ------------------------------------------------------------------------------------------------------ what users do


class Written(Layers):
    """Weights written to, read and copied outside autograd."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, second, third, fourth = (layer.weight for layer in self.layers)
        before = fourth.norm()  # gathers it
        fourth.data.mul_(0.5)
        self.halves = fourth.norm() / before
        fourth.data = fourth.data + 0.01
        self.moved = fourth.sum()
        with torch.no_grad():
            first[0] = 0.5
            second.lerp_(third, 0.25)
            third.clamp_(-0.1, 0.1)
            nn.init.constant_(self.layers[0].bias, 0.25)
        third.data.mul_(0.5)
        third.detach().add_(0.01)
        self.norms = torch.stack([self.halves, self.moved, *(w.norm() for w in (first, second, third))])
        self.gradient = second.grad.norm()  # type: ignore[union-attr]
        self.seen = float(self(batch).sum())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layers[1].weight[:3], self.layers[0].bias[:3])


def _write(layout: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    module = Written()
    where = dict(devices=1) if layout is None else dict(devices=2, strategy=HybridParallelStrategy(**layout))
    trainer = Trainer(
        accelerator="cpu", **where, max_steps=2, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=1, use_distributed_sampler=False,
    )  # fmt: skip
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, batch_size=4))
    kinds = {type(p).__name__ for p in module.parameters()}
    return kinds, [p.detach().clone() for p in module.parameters()], module.norms, module.gradient, module.seen


def test_weights_are_read_and_written_as_whole_ones(pool: Pool) -> None:
    # Both replicas have the same batches, so the mean of their gradients is one device's.
    ((_, *reference),) = pool.run(1, _write, None)
    for kinds, *found in pool.run(2, _write, DP):
        assert kinds == {"Parameter"}  # whole again
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-14)


class Keeps(Layers):
    """Copies of weights, in attributes and in a callback."""

    def on_fit_start(self) -> None:
        self.start = copy.deepcopy(self.state_dict())

    def on_train_batch_end(self, *args: Any) -> None:
        self.copies = [p.detach().clone() for p in self.parameters()]


class ReadsLast(Layers):
    """On a rank of another stage no part of it lies."""

    def on_train_start(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.copies = [layer.weight.norm().detach() for layer in self.layers]


class SetsToKept(Layers):
    def on_train_batch_end(self, *args: Any) -> None:
        self.ones = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
        self.layers[-1].weight.data = self.ones


class DecaysInStep(Layers):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[0].weight.data.mul_(0.99)  # outside of the layer
        return super().training_step(batch, batch_idx)


class Averages(Layers):
    """An average of all weights, made of them by arithmetic, which the weights take at the end."""

    def on_train_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *args: Any) -> None:
        self.average = [a + (p.detach().to(a.device) - a) / 3 for a, p in zip(self.average, self.parameters())]

    def on_train_end(self) -> None:
        for p, a in zip(self.parameters(), self.average, strict=True):
            p.data.copy_(a)


class LooksAgain(Layers):
    """As a teacher does: the first layers run again on the last rank, without a gradient."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            other = super().training_step(batch + 0.1, batch_idx)
        return loss + (loss - other).square()


def _trained(layout: dict[str, Any] | None, kind: type[Layers]) -> Any:
    torch.manual_seed(0)
    module = kind()
    ranks: Any = {"devices": 1} if layout is None else {"devices": 4, "strategy": HybridParallelStrategy(**layout)}
    trainer = Trainer(
        accelerator="cpu", max_steps=3, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **ranks,
    )  # fmt: skip
    trainer.fit(module, _data())
    return [p.detach().clone() for p in module.parameters()]


@long()
@slow("Averages-tensor", "LooksAgain-fsdp", "LooksAgain-tensor")
@pytest.mark.parametrize(
    "beside", [{"data_parallel": "fsdp", "data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["fsdp", "tensor"]
)
@pytest.mark.parametrize("kind", [Averages, LooksAgain])
def test_weights_in_parts_of_another_stage_are_one_devices(
    pool: Pool, kind: type[Layers], beside: dict[str, Any]
) -> None:
    (one,) = pool.run(1, _trained, None, kind)
    for found in pool.run(4, _trained, {"pipeline_parallel_size": 2, **beside}, kind):
        for x, y in zip(found, one, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


class Transposes(Layers):
    """A weight is used outside its layer, by a view of it, beside activations."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + nn.functional.linear(torch.tanh(layer(batch)), layer.weight.t())
        return batch


def _predicted(layout: dict[str, Any] | None) -> Tensor:
    torch.manual_seed(0)
    ranks: Any = {"devices": 1} if layout is None else {"devices": 4, "strategy": HybridParallelStrategy(**layout)}
    trainer = Trainer(
        accelerator="cpu", max_steps=1, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **ranks,
    )  # fmt: skip
    return torch.cat([x.clone() for x in trainer.predict(Transposes(), _data())])  # type: ignore[union-attr,arg-type]


def test_a_view_of_a_weight_in_parts_meets_samples_of_a_microbatch(pool: Pool) -> None:
    (one,) = pool.run(1, _predicted, None)
    layout = {"data_parallel": "fsdp", "data_parallel_size": 2, "pipeline_parallel_size": 2, "microbatches": 2}
    for found in pool.run(4, _predicted, layout):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-9)


def _keep(layout: dict[str, Any] | None, kind: type[Layers] = Keeps) -> Any:
    torch.manual_seed(0)
    module: Any = kind()
    ranks: Any = {"devices": 1} if layout is None else {"strategy": HybridParallelStrategy(**layout)}
    ranks = {"devices": int(os.environ["WORLD_SIZE"]), **ranks}
    trainer = Trainer(
        accelerator="cpu", max_steps=2, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **ranks,
    )  # fmt: skip
    trainer.fit(module, _data())
    return [*module.start.values(), *module.copies]


@long("layout1")
@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}])
def test_what_user_code_kept_of_weights_is_whole_afterwards(pool: Pool, layout: dict[str, Any]) -> None:
    (one,) = pool.run(1, _keep, None)
    for found in pool.run(2 if not layout else 4, _keep, {"data_parallel": "fsdp", "data_parallel_size": 2, **layout}):
        assert all(type(x) is Tensor for x in found)
        for x, y in zip(found, one, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_weights_in_parts_of_another_stage_are_read_between_steps(pool: Pool) -> None:
    (one,) = pool.run(1, _keep, None, ReadsLast)
    layout = {"data_parallel": "fsdp", "data_parallel_size": 2, "pipeline_parallel_size": 2}
    for found in pool.run(4, _keep, layout, ReadsLast, grace=5):
        torch.testing.assert_close(found, one, rtol=1e-9, atol=0)


@slow("SetsToKept-*")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (SetsToKept, "'layers.*weight' was set to a tensor that is kept.*Set it to a `clone"),
        (DecaysInStep, "A weight is written to at .*within a step whose microbatches share what"),
    ],
)
def test_weights_in_parts_of_another_stage_are_not_waited_for(pool: Pool, kind: type[Layers], said: str) -> None:
    layout = {"data_parallel": "fsdp", "data_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(RanksFailedError, match=said) as caught:
        pool.run(4, _keep, layout, kind, grace=5)
    assert "stays whole" not in str(caught.value)


class Fails(Layers):
    fails = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.fails:
            raise RuntimeError("as told")


class Clamping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamps(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Clamping(WIDTH, WIDTH) for _ in range(LAYERS)])


class Alone(Layers):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            with mock.patch.object(handshake, "PATIENCE", timedelta(seconds=1)):
                self.layers[0](batch)


def _trainer(layout: dict[str, Any], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=HybridParallelStrategy(**layout),
        max_steps=2, precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def _data() -> DataLoader:  # type: ignore[type-arg]
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


def _alone() -> None:
    _trainer(DP).fit(Alone(), _data())


def _fails_and_trains(layout: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    module = Fails()
    start = {name: x.clone() for name, x in module.state_dict().items()}
    world = os.environ["WORLD_SIZE"]
    with pytest.raises(RuntimeError, match="as told"):
        _trainer(layout).fit(module, _data())
    os.environ["WORLD_SIZE"] = world
    module.fails = False
    trainer = _trainer(layout, callbacks=[Restores(start)])
    trainer.fit(module, _data())
    hooks = [name for name, m in module.named_modules() if m._forward_hooks]
    return [p.detach().clone() for p in module.parameters()], hooks


class Restores(Callback):
    def __init__(self, start: dict[str, Tensor]) -> None:
        self.start = start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for name, p in pl_module.named_parameters():
                if not is_elsewhere(p):
                    p.copy_(self.start[name])


def _plain(layout: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = Layers()
    _trainer(layout).fit(module, _data())
    return [p.detach().clone() for p in module.parameters()]


@slow(but=["data"])
@pytest.mark.parametrize("layout", [DP, DP | PP], ids=["data", "pipeline"])
def test_after_a_run_that_failed_the_module_trains_again(layout: dict[str, Any], pool: Pool) -> None:
    expected = pool.run(2, _plain, dict(data_parallel_size=2))[0]
    for found, hooks in pool.run(4 if "pipeline_parallel_size" in layout else 2, _fails_and_trains, layout):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        assert hooks == []


def _clamps(layout: dict[str, Any]) -> str:
    try:
        _trainer(layout).fit(Clamps(), _data())
    except Exception as error:
        return f"{error}"
    return ""


def test_in_a_pipeline_a_write_within_the_step_is_refused(pool: Pool) -> None:
    assert pool.run(2, _clamps, DP) == ["", ""]
    for told in pool.run(4, _clamps, DP | PP):  # before training
        assert "microbatches=2" in told and "'layers.0.weight'" in told


def test_a_use_on_one_rank_alone_names_those_that_did_not_come(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="Rank 0 called the module outside a step, and waits in vain for rank 1"):
        pool.run(2, _alone, until=0)


def _alone_and_warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _plain(dict(data_parallel="fsdp", tensor_parallel_size=2))
    return [f"{w.message}" for w in caught if "fsdp" in f"{w.message}"]


def test_where_there_is_nothing_to_share_out_a_warning_says_so(pool: Pool) -> None:
    first, second = pool.run(2, _alone_and_warned)
    assert len(first) == 1 and "no two of the 2 ranks use the same weights (data 1, sequence 1)" in first[0]
    assert second == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="data_parallel must be 'ddp' or 'fsdp', got 'zero'"):
        HybridParallelStrategy(data_parallel="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reshard_after_forward must be True, False or 'auto', got 'yes'"):
        HybridParallelStrategy(data_parallel="fsdp", reshard_after_forward="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="goes with data_parallel='fsdp', but this is 'ddp'"):
        HybridParallelStrategy(reshard_after_forward=True)


def test_who_stores_which_index_of_a_weight_that_is_split_over_the_tensor_axis() -> None:
    split = Positions.of([0, 0, 1, 1, 0, 0, 1])
    assert composed(split, 2, 2).owner.tolist() == [0, 0, 1, 1, 2, 2, 3]
