"""A pipeline averages gradients over replicas as they become final, with the same messages and the same result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ledger
from lightning_par.optim import gradient_sync
from lightning_par.pipeline.plan.schedule import SCHEDULES, make_schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.run.final_gradients import FinalGradients
from lightning_par.pipeline.run.timetable import Event, Exchange
from tests.helpers.accelerator import accelerator
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

WIDTH, STEPS = 4, 3


def _told(order: list[Event], stages: dict[Tensor, set[int]], noted: dict[str, list[Tensor]]) -> dict[str, list[int]]:
    """Which leaves are told of in which event, by their values; those ``noted`` get a gradient there."""
    now: list[int] = []
    finals = FinalGradients(stages, lambda x: now.append(int(x)), lambda _: None)
    finals.follow(order)
    found = {}
    for event in order:
        finals.begin(event)
        for leaf in noted.get(str(event), []):
            finals.note(leaf)
        within = len(now)
        finals.end(event)
        if now:
            found[str(event)] = [within, *now]
        now.clear()
    return found


def _action(text: str) -> Action:
    stage, microbatch = text[1:].split(".")
    return Action(text[0], int(stage), int(microbatch))  # type: ignore[arg-type]


def test_a_gradient_is_final_within_the_last_backward_or_else_at_its_end() -> None:
    a, b, never = (torch.tensor(float(i)) for i in range(3))
    order: list[Event] = [_action(text) for text in ("F0.0", "F0.1", "B0.0", "B0.1")]
    noted = {"B0.0": [a, b, b], "B0.1": [a, b]}  # a backward within backward gives `b` twice: it may do so again
    assert _told(order, {a: {0}, b: {0}, never: {0}}, noted) == {"B0.1": [1, 0, 1, 2]}


def test_a_gradient_is_final_with_the_last_stage_that_uses_its_parameter() -> None:
    a, both = torch.tensor(0.0), torch.tensor(1.0)
    order: list[Event] = [_action(text) for text in ("F0.0", "F2.0", "B2.0", "F0.1", "F2.1", "B2.1", "B0.0", "B0.1")]
    noted = {"B2.0": [a, both], "B2.1": [a, both], "B0.0": [both], "B0.1": [both]}
    assert _told(order, {a: {2}, both: {0, 2}}, noted) == {"B2.1": [1, 0], "B0.1": [1, 1]}


def test_with_backwards_of_weights_apart_nothing_leaves_before_the_last_message() -> None:
    a, b = torch.tensor(0.0), torch.tensor(1.0)
    last = Exchange(5, (), ())
    order: list[Event] = [*map(_action, ("F0.0", "F2.0", "I2.0", "W2.0")), last, _action("I0.0"), _action("W0.0")]
    assert _told(order, {a: {2}, b: {0}}, {}) == {str(last): [0, 0], "W0.0": [0, 1]}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_backwards_end_from_the_last_stage_to_the_first_with_any_number_of_microbatches(schedule: str) -> None:
    for microbatches in range(1, 9):
        made = make_schedule(schedule, 2, microbatches)
        for actions in made.actions:
            backwards = [action.stage for action in actions if action.op == "B"]
            ends = [stage for place, stage in enumerate(backwards) if stage not in backwards[place + 1 :]]
            assert ends == sorted(ends, reverse=True)


class Net(LightningModule):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(8)))
        self.blocks[2].weight.requires_grad_(False)
        self.keeps = keeps
        self.gradients: list[dict[str, Tensor | None]] = []

    def training_step(self, batch: Tensor) -> Tensor:
        return (torch.tanh(self.blocks(batch)) ** 2).mean()

    def optimizer_zero_grad(self, *args: Any) -> None:
        if not self.keeps:
            super().optimizer_zero_grad(*args)

    def on_before_optimizer_step(self, *_: Any) -> None:
        named = [(name, p.grad) for name, p in self.named_parameters() if not p.is_meta]
        self.gradients.append({name: None if grad is None else grad.clone() for name, grad in named})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Watch(Callback):
    """How many buckets have left when the step returns, and what moved in it."""

    def __init__(self) -> None:
        self.ahead: list[int] = []
        self.moved: list[list[tuple[str, str, str, int]]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.books = ledger()
        self.open = self.books.__enter__()

    def on_before_zero_grad(self, *_: Any) -> None:
        self.ahead.append(sum((t.axis, t.purpose) == ("data", "gradients") for t in self.open.transfers))

    def on_train_batch_end(self, *_: Any) -> None:
        self.books.__exit__(None, None, None)
        self.moved.append([(t.axis, t.verb, t.purpose, t.nbytes) for t in self.open.transfers])


class MeetsTheLoss(Callback):
    def on_before_backward(self, *_: Any) -> None:
        pass


def _batches(sizes: list[int]) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(size, WIDTH, dtype=torch.float64, generator=g) for size in sizes]


def train(schedule: str, late: bool, keeps: bool = False, window: int = 1, sizes: tuple[int, int] = (4, 4)) -> Any:
    """Gradients before each optimizer step, what moved, and how many buckets left ahead, on this rank."""
    warnings.simplefilter("ignore")
    module, watch = Net(keeps), Watch()
    trainer = Trainer(
        strategy=HybridParallelStrategy(
            data_parallel_size=2, pipeline_parallel_size=2, microbatches=4, schedule=schedule
        ),
        accelerator=accelerator(), devices=4, max_steps=STEPS, callbacks=[watch, *[MeetsTheLoss()] * late],
        accumulate_grad_batches=window, gradient_clip_val=0.1, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rank = trainer.strategy.global_rank if not torch.distributed.is_initialized() else torch.distributed.get_rank()
    replica = rank // 2
    batches = _batches([*sizes] * STEPS * window)[replica::2]
    with patch.object(gradient_sync, "BUCKET_BYTES", 8 * WIDTH * (WIDTH + 1)):  # a layer each
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module.gradients, watch.moved, watch.ahead


def _one_device(keeps: bool, window: int, sizes: tuple[int, int]) -> list[dict[str, Tensor | None]]:
    module = Net(keeps)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, accumulate_grad_batches=2 * window, gradient_clip_val=0.1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_batches([*sizes] * STEPS * window), batch_size=None))  # type: ignore[arg-type]
    return module.gradients


def _cases() -> Iterator[Any]:
    for schedule in SCHEDULES:
        yield pytest.param(schedule, {}, id=schedule)
    yield pytest.param("1f1b", {"keeps": True}, id="gradients-are-kept")
    yield pytest.param("interleaved_1f1b", {"window": 2}, id="a-window-of-two")
    yield pytest.param("zbv", {"sizes": (4, 3)}, id="other-microbatches")


@long()
@slow(but=["a-window-of-two"])
@pytest.mark.parametrize(("schedule", "options"), [*_cases()])
def test_the_average_leaves_ahead_with_the_same_messages_and_is_one_devices(
    pool: Pool, schedule: str, options: dict[str, Any]
) -> None:
    late, early = (pool.run(4, train, schedule, how, **options) for how in (True, False))
    one = _one_device(options.get("keeps", False), options.get("window", 1), options.get("sizes", (4, 4)))
    for (_, before, none), (gradients, after, ahead) in zip(late, early):
        for a, b in zip(before, after):
            assert sorted(a) == sorted(b)
            for axis in {x[0] for x in a}:  # and along one axis in the same order
                assert [x for x in a if x[0] == axis] == [x for x in b if x[0] == axis]
        assert set(none) == {0}
        buckets = sum((axis, purpose) == ("data", "gradients") for axis, _, purpose, _ in after[-1])
        assert set(ahead) == ({buckets} if options.get("window", 1) == 1 else {0})
        for ours, theirs in zip(gradients, one, strict=True):
            for name, grad in ours.items():
                want = theirs[name]
                assert (grad is None) == (want is None)
                if grad is not None and want is not None:
                    torch.testing.assert_close(grad, want, rtol=0, atol=1e-12)
