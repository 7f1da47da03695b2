"""A few training steps of the user's module on this rank, with everything kept that a layout must not change."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_par.sharded.patches.float_casts import all_in_float64
from lightning_par.strategies.namespace import Namespace
from lightning_par.verdict.result import KeepGradients, Result, detached

SEED = 1234
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Job:
    """What is trained, and how; the same under each layout.

    Args:
        module: a LightningModule, or what makes one.
        batches: in order; each step of each replica takes the next one, and the first follows the last.
        namespace: which Lightning the module belongs to.
        steps: optimizer steps.
        gradient_clip_val: the Trainer's; left out where the module optimizes by hand.
        dropout: whether it is left on.
    """

    module: Any
    batches: tuple[Any, ...]
    namespace: Namespace
    steps: int = 2
    gradient_clip_val: float | None = 0.05
    dropout: bool = False


def train(job: Job, strategy: Any, devices: int, copies: int, folder: str) -> Result:
    """Train on this rank, one of ``devices``.

    Args:
        job: what to train.
        strategy: None for one device, which accumulates over as many batches as there are ``copies``.
        devices: ranks of the layout.
        copies: the size of the data axis.
        folder: all ranks share it.
    """
    _seed(SEED + int(os.environ.get("RANK", "0")))  # weights and draws come from rank 0
    with warnings.catch_warnings(), all_in_float64():
        warnings.simplefilter("ignore")
        module = _own(job.module) if isinstance(job.module, nn.Module) else job.module()
        undropped = [] if job.dropout else _without_dropout(module)
        kind: Any = type("Keeping", (KeepGradients, job.namespace.from_pytorch("callbacks", "Callback")), {})
        keep: KeepGradients = kind(folder)
        window = copies if strategy is None else 1
        trainer = import_module(job.namespace.pytorch).Trainer(
            accelerator="cpu",
            devices=devices,
            **({} if strategy is None else dict(strategy=strategy)),
            plugins=[job.namespace.from_fabric("plugins.environments", "LightningEnvironment")()],
            precision="64-true",
            max_epochs=1,
            limit_train_batches=job.steps * window,
            limit_val_batches=0,
            accumulate_grad_batches=window,
            gradient_clip_val=job.gradient_clip_val if module.automatic_optimization else None,
            callbacks=[keep],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        batches = _Batches(job.batches, job.steps * window, None if strategy is None else trainer.strategy)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    result = keep.result
    result.metrics, result.after = detached(trainer.callback_metrics), detached(module.state_dict())
    result.undropped = sorted({*undropped})
    return result


def _own(module: Any) -> Any:
    """A copy of what a fork took along: a graph of the user's may hold the parameters, which then can't be split."""
    module.trainer = None  # of an earlier fit
    return copy.deepcopy(module)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class _Batches(Dataset[Any]):
    """Of ``count`` batches, those of this rank's replica, or all of them where there is no strategy."""

    def __init__(self, batches: tuple[Any, ...], count: int, strategy: Any) -> None:
        self.batches, self.count, self.strategy = batches, count, strategy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError(index)
        # Which replica this is, is known once the Trainer has connected the ranks.
        place = dict(num_replicas=1, rank=0) if self.strategy is None else self.strategy.distributed_sampler_kwargs
        at = index * place["num_replicas"] + place["rank"]
        return copy.deepcopy(self.batches[at % len(self.batches)])  # a step may write to it


def _without_dropout(module: Any) -> list[str]:
    """Turn dropout off, now and in what ``configure_model`` makes; the list of where fills as that happens."""
    done: list[str] = []
    _turn_off(module, done)
    base: Any = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    if type(module).configure_model is not base.configure_model:
        _after(module, "configure_model", lambda: _turn_off(module, done))
    return done


def _after(module: Any, method: str, then: Callable[[], None]) -> None:
    run = getattr(module, method)

    def both() -> None:
        run()
        then()

    vars(module)[method] = both


def _turn_off(module: nn.Module, done: list[str]) -> None:
    """Dropout layers by their ``p``; attention, recurrent layers and users' own code by numbers that are named so."""
    for path, child in module.named_modules():
        for name, value in list(vars(child).items()):
            mine = name == "p" if isinstance(child, _DROPOUTS) else "drop" in name
            if mine and isinstance(value, float) and 0 < value <= 1:
                setattr(child, name, 0.0)
                done.append(path if name == "p" else f"{path}.{name}".removeprefix("."))
