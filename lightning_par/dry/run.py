"""One rank's real training step, with no other rank and no values."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_par.dry.counts import CountMixin, Counts, StepEndedError
from lightning_par.dry.strategy import dry
from lightning_par.dry.weights import build_deferred
from lightning_par.dry.world import make_environment, world_of
from lightning_par.private.fake_tensors import copyable_fakes
from lightning_par.python_state import generators
from lightning_par.strategies.namespace import LIGHTNING, Namespace

_STEPS = 2
"""Of the optimizer: the first one alone makes its state, and shows in which precisions and order weights are used."""


@dataclass(frozen=True)
class DryRank:
    """Which rank of what is run.

    Attributes:
        rank: its number.
        devices: how many there are.
        on_host: on each host.
        layout: `HybridParallelStrategy`'s arguments.
        precision: the Trainer's.
        accumulated: batches for each step of the optimizer.
        clip: the Trainer's ``gradient_clip_val``.
        device: of the fakes.
    """

    rank: int
    devices: int
    on_host: int
    layout: Mapping[str, Any]
    precision: str
    accumulated: int
    clip: float | None
    device: torch.device


def run_rank(made: Any, batch: Any, asked: DryRank, namespace: Namespace = LIGHTNING) -> Counts:
    """Train one step of the optimizer as one rank.

    Args:
        made: a LightningModule, its class, or a function that makes one.
        batch: of a replica.
        asked: the rank.
        namespace: whose Lightning the module is of.
    """
    lightning, ours = import_module(namespace.pytorch), import_module(namespace.ours)
    kind = dry(ours.HybridParallelStrategy)
    strategy = kind(**{"verify": False, **asked.layout})
    count = type("Count", (CountMixin, lightning.Callback), {})(_STEPS)
    environment = make_environment(namespace, asked.rank, asked.devices, asked.on_host)
    with contextlib.ExitStack() as stack:
        stack.enter_context(generators.kept())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.enter_context(world_of(namespace))
        stack.enter_context(copyable_fakes())
        module = build_deferred(made)
        strategy.stack = stack.enter_context(contextlib.ExitStack())
        strategy.target = asked.device
        stack.callback(count.close)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=min(asked.devices, asked.on_host),
            num_nodes=max(1, asked.devices // asked.on_host), strategy=strategy, plugins=[environment],
            max_steps=_STEPS,
            accumulate_grad_batches=asked.accumulated, gradient_clip_val=asked.clip, precision=asked.precision,
            callbacks=[count], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, use_distributed_sampler=False,
        )  # fmt: skip
        loader: Any = DataLoader(_Again(batch, asked.accumulated * _STEPS + 1), batch_size=None)  # type: ignore[arg-type]
        try:
            trainer.fit(module, loader)
        except StepEndedError:
            return count.found
    raise RuntimeError("The run ended before its first step.")


class _Again:
    """A data set of batches that are all the same."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.batch
