"""A stranger trained on this rank, with what the law names, and how its parameters and batches were cut."""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.sharded.patches.float_casts import all_in_float64
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.verdict.result import KeepGradients, Result, detached
from tests.strangers.stranger import STEPS, Stranger

_KEPT = ("state_dict", "optimizer_states", "epoch", "global_step", "lr_schedulers")


@dataclass
class Seen:
    """By one rank.

    Attributes:
        result: what is compared.
        held: parameters of which this rank holds values.
        total: parameters of the model.
        microbatches: into how many parts a training batch was cut; 0 without a pipeline.
        uncut: why it was cut into fewer than asked for.
    """

    result: Result
    held: int = 0
    total: int = 0
    microbatches: int = 0
    uncut: tuple[str, ...] = field(default=())


def find(package: str, name: str) -> Stranger:
    return import_module(f"tests.strangers.{package}").STRANGERS[name]


def train(package: str, name: str, strategy: str | None, replicas: int = 1) -> Seen:
    """Train on this rank.

    Args:
        package: the file here.
        name: of the stranger in it.
        strategy: None for one device.
        replicas: copies of the model, each of which has its own batches; one device accumulates over as many.
    """
    stranger = find(package, name)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    window = replicas if strategy is None else 1
    float64 = stranger.precision == "64-true"
    with warnings.catch_warnings(), all_in_float64(float64), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        callbacks = import_module(f"{stranger.pytorch}.callbacks")
        keep = type("Keeping", (_Keep, callbacks.Callback), {})(folder)
        arguments = dict(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            precision=stranger.precision,
            max_steps=STEPS,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            accumulate_grad_batches=window,
            callbacks=[keep],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        if strategy is not None:
            arguments["strategy"] = _strategy(strategy, stranger.pytorch)
        if replicas > 1 or stranger.own_loop:
            arguments["use_distributed_sampler"] = False
        if not stranger.own_loop:
            arguments["replicas"] = (replicas if strategy else 1, int(os.environ["RANK"]))
        stranger.fit(arguments)
    seen = keep.seen
    seen.result.after = detached(keep.module.state_dict())
    seen.result.checkpoint = {k: v for k, v in seen.result.checkpoint.items() if k in _KEPT}
    return seen


def _strategy(name: str, pytorch: str) -> Any:
    home = import_module("lightning_par.pl" if pytorch == "pytorch_lightning" else "lightning_par")
    if name == "layer_placement":
        return home.LayerPlacementStrategy("balanced")
    return home.HybridParallelStrategy(data_parallel="fsdp") if name == "fsdp" else name


class _Keep(KeepGradients):
    """Also looks at what this rank holds, and at the programs of a pipeline."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.seen = Seen(self.result)

    def __deepcopy__(self, memo: Any) -> _Keep:
        return self  # neuralforecast copies a model with all that it was given

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.module = pl_module

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.seen.held = sum(map(_held, pl_module.parameters()))
        self.seen.total = sum(p.numel() for p in pl_module.parameters())
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            made = engine.programs.made.items()
            counts = [p.microbatches for key, programs in made for p in programs if key[0] == "training_step"]
            self.seen.microbatches = max(counts, default=0)
            self.seen.uncut = tuple(engine.programs.refused.values())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self.result.metrics = detached(trainer.callback_metrics)


def _held(p: Tensor) -> int:
    if is_elsewhere(p) or p.is_meta:
        return 0
    return p.local.numel() if isinstance(p, ShardedTensor) else p.numel()
