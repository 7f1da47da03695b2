"""One rank's real training step, with no other rank and no values."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_par.dry.accelerator import Kind, make_accelerator, refuse_without_gpu
from lightning_par.dry.counts import CountMixin, Counts, StepEndedError
from lightning_par.dry.strategy import dry
from lightning_par.dry.weights import build_deferred
from lightning_par.dry.world import make_environment, world_of
from lightning_par.planner.recording.given_batch import Given
from lightning_par.private.fake_tensors import WITHOUT_VALUE, fakes_as_tensors
from lightning_par.python_state import generators
from lightning_par.python_state.user_code import last_of, line_of
from lightning_par.strategies.namespace import namespace_of
from lightning_par.strategies.startup_table import bytes_text
from lightning_par.trial.first_batch import TRANSFERS, is_users
from lightning_par.trial.known_values import forget

_NUMPY = "numpy() is not supported for tensor subclasses"  # as one without values
_LOGGED = "trainer.connectors.logger_connector.result"
_STEPS = 2
"""Of the optimizer: the first one alone makes its state, and shows in which precisions and order weights are used."""


@dataclass(frozen=True)
class DryRank:
    """Which rank of what is run; see `lightning_par.dry_run`.

    Raises:
        ValueError: there is no such rank.
    """

    rank: int
    devices: int
    on_host: int
    layout: Mapping[str, Any]
    precision: str | int = "32-true"
    accumulated: int = 1
    clip: float | None = None
    clip_algorithm: str | None = None
    accelerator: Kind = "cpu"
    saves: bool = True
    """Whether what a checkpoint takes is told, too, which takes as long as half a step."""

    def __post_init__(self) -> None:
        counts = {
            "devices": self.devices,
            "devices_per_host": self.on_host,
            "accumulate_grad_batches": self.accumulated,
        }
        for name, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a positive int, got {count!r}.")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.devices:
            raise ValueError(
                f"rank must be one of 0 to {self.devices - 1}, as devices={self.devices}, got {self.rank!r}."
            )
        if self.accelerator not in ("cpu", "gpu"):
            raise ValueError(f"accelerator must be 'cpu' or 'gpu', got {self.accelerator!r}.")
        if self.accelerator == "gpu":
            refuse_without_gpu()
        if self.devices % min(self.devices, self.on_host):
            raise ValueError(
                f"devices={self.devices} is no multiple of devices_per_host={self.on_host}: Lightning starts equally "
                "many processes on each host."
            )

    @property
    def hosts(self) -> tuple[int, int]:
        """How many there are, and ranks on each."""
        each = min(self.devices, self.on_host)
        return self.devices // each, each


def run_rank(module: Any, given: Given, asked: DryRank) -> Counts:
    """Train two steps of the optimizer as one rank; see `lightning_par.dry_run`.

    Args:
        module: a LightningModule, its class, or a function that makes one.
        given: the batch of a replica.
        asked: the rank.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(generators.kept())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # it is 0, which will do
        stack.enter_context(fakes_as_tensors(forget))
        built = build_deferred(module)
        namespace = namespace_of(type(built))
        lightning, ours = import_module(namespace.pytorch), import_module(namespace.ours)
        strategy = dry(ours.HybridParallelStrategy)(**{"verify": False, **asked.layout})
        hosts, on_host = asked.hosts
        stack.enter_context(world_of(namespace))
        # numbers for a progress bar, which there is none of, need not be read
        logged = import_module(f"{namespace.pytorch}.{_LOGGED}")
        stack.enter_context(patch.object(logged, "convert_tensors_to_scalars", lambda data: data))
        strategy.stack = stack.enter_context(contextlib.ExitStack())
        count = type("Count", (CountMixin, lightning.Callback), {"saves": asked.saves})()
        stack.callback(count.close)
        trainer = lightning.Trainer(
            accelerator=make_accelerator(namespace, asked.accelerator), devices=on_host, num_nodes=hosts,
            strategy=strategy,
            plugins=[make_environment(namespace, asked.rank, asked.devices, on_host)], max_epochs=1,
            accumulate_grad_batches=asked.accumulated, gradient_clip_val=asked.clip,
            gradient_clip_algorithm=asked.clip_algorithm, precision=asked.precision,
            callbacks=[count], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, use_distributed_sampler=False,
        )  # fmt: skip
        strategy.comes = partial(count.come, trainer)
        data: Any = _Again(given.batch, asked.accumulated * _STEPS + 1)
        loader = DataLoader(data, batch_size=None)
        with _without_values(built, count.found):
            try:
                if given.data is None:
                    trainer.fit(built, loader)
                else:
                    hooks = _hooks_of(given.data, loader, trainer, lightning.LightningDataModule)
                    trainer.fit(built, datamodule=stack.enter_context(hooks))
            except StepEndedError:
                count.found.title = _title(asked, strategy.layout, built)
                return count.found
    raise RuntimeError(f"The run ended before its step {_STEPS}: the module, or a callback of it, has stopped it.")


def _title(asked: DryRank, layout: Any, module: nn.Module) -> str:
    name = f"{type(module).__name__}, {asked.accelerator}, {asked.precision}"
    return f"Rank {asked.rank} of {asked.devices} ({layout}), {name}: step {_STEPS} of the optimizer"


@contextlib.contextmanager
def _without_values(module: nn.Module, found: Counts) -> Iterator[None]:
    """
    Raises:
        ValueError: what runs inside asks for the values of tensors that have none; says what was ``found`` before.
    """
    try:
        yield
    except (*WITHOUT_VALUE, RuntimeError) as error:
        if not isinstance(error, WITHOUT_VALUE) and _NUMPY not in str(error):
            raise
        stepping = last_of(error, _steps)
        raise ValueError(
            _of_step(line_of(error), error, found.parameters)
            if stepping is None
            else _of_optimizer(stepping.f_locals["self"], module)
        ) from error


def _of_step(line: str | None, error: BaseException, parameters: int) -> str:
    held = f"this rank holds {bytes_text(parameters)} of weights; " if parameters else ""
    return (
        f"The step asks for the values of tensors at {line or 'an unknown line'} ({error}), and in a dry run these "
        "have none. Keep what goes by values, as `if x.isnan().any():` or `x.item()`, out of the step. What can still "
        f"be said: {held}`python -m lightning_par plan` goes one of the ways that a step takes by such values, as "
        "where a router chooses experts, and counts that, or says what weights and optimizer take."
    )


def _of_optimizer(optimizer: Optimizer, module: nn.Module) -> str:
    code = getattr(getattr(module, "configure_optimizers", None), "__code__", None)
    place = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
    return (
        f"{type(optimizer).__name__}, which configure_optimizers makes{place}, steps by the values of gradients or of "
        "the loss, and in a dry run these have none. Give the module of the dry run another one, as torch.optim.AdamW."
    )


def _steps(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer)


@contextlib.contextmanager
def _hooks_of(data: Any, loader: Any, trainer: Any, base: Any) -> Iterator[Any]:
    """A datamodule that has ``loader`` for training and the hooks of ``data`` around a batch's transfer, no other."""

    def train_dataloader(self: Any) -> Any:
        return loader

    def hook(name: str) -> Any:
        return lambda self, *args: getattr(data, name)(*args)

    hooks = {name: hook(name) for name in TRANSFERS if is_users(data, name)}
    before, data.trainer = data.trainer, trainer
    try:
        yield type("Data", (base,), {**hooks, "train_dataloader": train_dataloader})()
    finally:
        data.trainer = before


class _Again:
    """A data set of batches that are all the same."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.batch
