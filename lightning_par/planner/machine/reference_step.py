"""A small module, trained for some steps under each axis, so that what Python takes there is known.

Its kernels and messages are too small to matter: what a step takes beyond what is predicted of these is Python's.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.planner.machine.machines import Machine
from lightning_par.planner.machine.overheads import Overhead
from lightning_par.planner.planner import Planner
from lightning_par.strategies.namespace import Namespace

WARM, COUNTED = 2, 8
"""Steps of a run that are not counted, and those that are."""

SHALLOW, DEEP = 1, 4
"""Blocks."""

MICROBATCHES = 2, 8


class ReferenceBlock(nn.Module):
    """A layer of a transformer."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, width = heads, 4 * heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, self.heads, 4).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class ReferenceRun:
    """One training of the module.

    Attributes:
        axis: the field of `lightning_par.planner.machine.overheads.Overheads` that it is about.
        arguments: `HybridParallelStrategy`'s.
        depth: blocks.
        accumulated: training steps for each of the optimizer.
    """

    axis: str
    arguments: Mapping[str, Any]
    depth: int
    accumulated: int = 1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of the optimizer, and of a training step without one, where there were such."""

    whole: float
    without: float = 0.0


def reference_runs(ranks: int) -> list[ReferenceRun]:
    """What is trained on ``ranks`` ranks, in the order in which `fitted` goes through it."""
    alone = {"data_parallel_size": ranks}
    found = [ReferenceRun("plain", alone, depth, 2) for depth in (SHALLOW, DEEP)]
    if ranks == 1:
        return found
    axis = next(size for size in (4, 3, 2, ranks) if ranks % size == 0)
    rest = {"data_parallel_size": ranks // axis}
    tensor = [
        {"tensor_parallel_size": size, "data_parallel_size": ranks // size}
        for size in dict.fromkeys((axis, 2))
        if ranks % size == 0
    ]
    found += [ReferenceRun("tensor", given, DEEP) for given in tensor]
    found += [
        ReferenceRun("residual", {**tensor[0], "shard_residual": True}, DEEP),
        ReferenceRun("sequence", {"sequence_parallel_size": axis, "attention": "ring", **rest}, DEEP),
        ReferenceRun("stored", {**alone, "data_parallel": "fsdp"}, DEEP),
    ]
    pipeline = {"pipeline_parallel_size": axis, **rest}
    return found + [ReferenceRun("pipeline", {**pipeline, "microbatches": m}, DEEP) for m in MICROBATCHES]


def train(run: ReferenceRun, ranks: int, namespace: Namespace, accelerator: str) -> StepTimes:
    """Train the module on this rank and all others."""
    home = import_module(namespace.pytorch)
    clock = _clock(home.Callback)
    strategy = import_module(namespace.ours).HybridParallelStrategy(**run.arguments)
    steps = WARM + COUNTED + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = home.Trainer(
            accelerator=accelerator, devices=ranks, strategy=strategy, max_steps=steps, callbacks=[clock],
            accumulate_grad_batches=run.accumulated, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        x = reference_batch(ranks)
        samples = [x[0]] * (len(x) * ranks * run.accumulated * (steps + 1))
        trainer.fit(reference_module(namespace, ranks, run.depth), torch.utils.data.DataLoader(samples, len(x)))  # type: ignore[arg-type]
    times = [end - begin for begin, end in zip(clock.times, clock.times[1:])][WARM * run.accumulated :]
    each = [min(times[number :: run.accumulated]) for number in range(run.accumulated)]  # others may run meanwhile
    return StepTimes(sum(each), each[0] if run.accumulated > 1 else 0.0)


def reference_batch(ranks: int) -> Tensor:
    """Samples x tokens x features, zeros."""
    heads = _heads(ranks)
    return torch.zeros(max(MICROBATCHES), 4 * heads, 4 * heads)


def reference_module(namespace: Namespace, ranks: int, depth: int) -> Any:
    """The module for ``ranks`` ranks, of ``depth`` blocks."""
    base: Any = import_module(namespace.pytorch).LightningModule

    class ReferenceModule(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ReferenceBlock(_heads(ranks)) for _ in range(depth))

        def training_step(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return ReferenceModule()


def fitted(machine: Machine, ranks: int, namespace: Namespace, times: Sequence[StepTimes]) -> Machine:
    """``machine`` with the overheads that make its predictions of these runs come out.

    Args:
        machine: with the overhead of an optimizer's step alone.
        ranks: of each run.
        namespace: whose module it is.
        times: of `reference_runs`.
    """
    runs = list(zip(reference_runs(ranks), times, strict=True))
    modules = {depth: partial(reference_module, namespace, ranks, depth) for depth in (SHALLOW, DEEP)}
    fit = _Fit(machine, modules, reference_batch(ranks), ranks)
    for axis in dict.fromkeys(run.axis for run, _ in runs):
        fit.take(axis, [(run, took) for run, took in runs if run.axis == axis])
    return fit.machine


class _Fit:
    """Overheads one after another: each is what those before it leave."""

    def __init__(self, machine: Machine, modules: Mapping[int, Any], batch: Tensor, ranks: int) -> None:
        self.machine, self.ranks = machine, ranks
        self.planners = {d: Planner(make, batch, machine, fused=machine.gpu) for d, make in modules.items()}

    def take(self, axis: str, runs: Sequence[tuple[ReferenceRun, StepTimes]]) -> None:
        """What the runs of one axis took."""
        if axis == "plain":
            counts = [self._functions(run) for run, _ in runs]
            self._line("plain", [self._left_of_step(*one) for one in runs], counts)
            self._line("replicas", [self._left(*one) for one in runs], [self._parameters(run) for run, _ in runs])
        elif axis == "pipeline":
            counts = [run.arguments["microbatches"] for run, _ in runs]
            self._line(axis, [self._left(*one) for one in runs], counts)
        else:
            if len(runs) > 1:
                self._latency(runs)
            left = [self._left(*one) for one in runs]
            things = self._units(runs[0][0]) if axis == "stored" else self._functions(runs[0][0])
            self._set(axis, Overhead(0.0, max(0.0, sum(left) / len(left) / things)))

    def _latency(self, runs: Sequence[tuple[ReferenceRun, StepTimes]]) -> None:
        """What a message takes in a step, where ranks are woken by it: two sizes of the tensor axis tell."""
        machine, link = self.machine, self.machine.link
        before = [self._left(*one) for one in runs]
        longer = replace(link, latency=link.latency + 1e-3)
        self.machine = replace(machine, link=longer, network=longer)
        hops = [(a - b) / 1e-3 for a, b in zip(before, [self._left(*one) for one in runs])]
        latency = link.latency + (before[0] - before[1]) / (hops[0] - hops[1])
        found = replace(link, latency=max(link.latency / 4, latency))
        self.machine = replace(machine, link=found, network=found)

    def _line(self, name: str, left: list[float], counts: list[int]) -> None:
        """As each of two runs of other counts leaves it."""
        each = max(0.0, (left[1] - left[0]) / (counts[1] - counts[0]))
        self._set(name, Overhead(max(0.0, left[0] - each * counts[0]), each))

    def _set(self, name: str, found: Overhead) -> None:
        self.machine = replace(self.machine, overheads=replace(self.machine.overheads, **{name: found}))

    def _predicted(self, run: ReferenceRun) -> Any:
        planner = self.planners[run.depth]
        planner.machine = self.machine
        samples = planner.step.samples * run.arguments["data_parallel_size"] * run.accumulated
        return planner.evaluate(run.arguments, self.ranks, samples)

    def _left(self, run: ReferenceRun, took: StepTimes) -> float:
        return float(took.whole - self._predicted(run).seconds)

    def _left_of_step(self, run: ReferenceRun, took: StepTimes) -> float:
        parts = self._predicted(run).parts
        return float(took.without - (parts["forward"] + parts["backward"]) / run.accumulated)

    def _functions(self, run: ReferenceRun) -> int:
        profile = self.planners[run.depth].profile(1)
        return sum(profile.kinds[kind].functions for kind in profile.order)

    def _parameters(self, run: ReferenceRun) -> int:
        return len(self.planners[run.depth].profile(1).all_parameters)

    def _units(self, run: ReferenceRun) -> int:
        return sum(bool(found) for found in self.planners[run.depth].profile(1).parameters)


def _heads(ranks: int) -> int:
    return max(2, ranks if ranks <= 4 else 4)


def _clock(callback: Any) -> Any:
    class Clock(callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.times.append(time.perf_counter())

    return Clock()
