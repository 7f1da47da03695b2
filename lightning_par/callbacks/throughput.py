"""How fast training goes: samples and tokens a second, and what of the devices' FLOPs a second it uses."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightning_par.callbacks.peak_flops import peak_flops
from lightning_par.mesh.layout import Groups
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.strategies.namespace import Namespace
from lightning_par.trial.first_step import FirstStep
from lightning_par.trial.step_flops import step_flops
from lightning_par.trial.trial_run import record_step

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}


class ThroughputMixin:
    """Logs how fast training goes, under any layout: each batch counts once, however many ranks share it.

    Logged, as of all devices together and with ``device/`` as of one on average:

    ====================================  ==============================================================
    ``throughput/samples_per_sec``        samples of all replicas; ``throughput/device/samples_per_sec``
    ``throughput/tokens_per_sec``         tokens, where there are some; ``throughput/device/tokens_per_sec``
    ``throughput/step_time``              seconds an optimizer step
    ``throughput/samples``, ``.../tokens``  since training started
    ``throughput/device/flops_per_sec``   the model's FLOPs
    ``throughput/mfu``                    model FLOPs utilization: their part of what the devices can do
    ====================================  ==============================================================

    A rate is over the steps since the last one was logged; time in validation does not count. The model's FLOPs are
    those of one device's step, forward and backward, as torch's ``FlopCounterMode`` counts them, whatever the layout:
    neither what activation checkpointing computes again, nor what several ranks compute each. They are found once, from
    the first batch, without computing it, and taken to be in proportion to a batch's samples. Under the strategies of
    this package and Lightning's.

    Args:
        every_n_steps: optimizer steps between two logs; the Trainer's ``log_every_n_steps`` by default.
        tokens_fn: tokens in a batch, as ``training_step`` is given it: ``lambda batch: batch["attention_mask"].sum()``
            leaves padding out. By default all entries of the batch's first tensor of int64 or int32 with two dims or
            more; a batch without one has none.
        samples_fn: samples in a batch; by default the size of its first tensor.
        flops_per_batch: the model's FLOPs for a batch, forward and backward, where they are not to be found.
        peak_flops: FLOPs a second that a device can do. By default those of known GPUs in the Trainer's precision, from
            their data sheets; of others there is no ``mfu``.

    Attributes:
        metrics: what was logged last.

    Raises:
        ValueError: a number is not positive.
        TypeError: a function is none.

    Example::

        Trainer(strategy="tensor_parallel", devices=4, callbacks=lightning_par.Throughput(every_n_steps=20))
    """

    namespace: Namespace

    def __init__(
        self,
        every_n_steps: int | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        samples_fn: Callable[[Any], int] | None = None,
        flops_per_batch: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        numbers = {"every_n_steps": every_n_steps, "flops_per_batch": flops_per_batch, "peak_flops": peak_flops}
        for name, number in numbers.items():
            if number is not None and not number > 0:
                raise ValueError(f"Throughput({name}={number}): write a positive number, or leave it out.")
        for name, function in (("tokens_fn", tokens_fn), ("samples_fn", samples_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"Throughput({name}={function!r}): write a function that is given a batch.")
        self.every_n_steps, self.tokens_fn, self.samples_fn = every_n_steps, tokens_fn, samples_fn
        self.flops_per_batch, self.peak_flops = flops_per_batch, peak_flops
        self.metrics: dict[str, float] = {}
        self._flops: float | None = None  # of a sample
        self._total = self._window = _NOTHING
        self._step, self._began, self._paused = 0, 0.0, 0.0

    def look(self, first: FirstStep) -> None:
        """Find the model's FLOPs, before it is laid out over ranks. All ranks must call it."""
        if self.flops_per_batch is None and first.trains and first.batch is not None:
            self._find(step_flops(first.recorded()), first.batch)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._flops = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.metrics, self._total, self._window = {}, _NOTHING, _NOTHING
        self._step, self._began = trainer.global_step, self._now(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._flops is not None or self._total != _NOTHING or self._window != _NOTHING:
            return
        if self.flops_per_batch is not None:
            self._flops = self.flops_per_batch / max(1, self._samples(batch))
        elif _groups(trainer) is None:
            began = self._now(trainer)
            shared = (trainer, trainer.strategy, *trainer.loggers, *trainer.callbacks)
            context = trainer.strategy.precision_plugin.forward_context
            recording = record_step(pl_module, "training_step", batch, shared=shared, context=context)
            self._find(step_flops(recording), batch)
            self._began += self._now(trainer) - began

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = (self._samples(batch), self._tokens(batch))
        self._window = tuple(map(sum, zip(self._window, seen)))
        every = self.every_n_steps or trainer.log_every_n_steps
        if every and trainer.global_step // every > self._step // every:
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = self._now(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._began += self._now(trainer) - self._paused

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step > self._step:
            self._log(trainer, pl_module)

    def _log(self, trainer: Any, module: Any) -> None:
        now, steps = self._now(trainer), trainer.global_step - self._step
        samples, tokens = counted = _over_replicas(self._window, trainer)
        self._total = tuple(map(sum, zip(self._total, counted)))
        seconds, devices = now - self._began, trainer.world_size
        self._window, self._step, self._began = _NOTHING, trainer.global_step, now
        amounts = {"samples": float(samples)} | ({"tokens": float(tokens)} if tokens else {})
        totals = {"samples": float(self._total[0]), "tokens": float(self._total[1])}
        found = {"step_time": seconds / steps} | {name: totals[name] for name in amounts}
        if self._flops is not None:
            amounts["flops"] = self._flops * samples
        for name, amount in amounts.items():
            found |= {f"{name}_per_sec": amount / seconds, f"device/{name}_per_sec": amount / seconds / devices}
        peak = self.peak_flops or peak_flops(trainer.strategy.root_device, _dtype(trainer, module), self.namespace)
        if peak is not None and "flops" in amounts:
            found["mfu"] = found["device/flops_per_sec"] / peak
        self.metrics = {f"throughput/{name}": value for name, value in found.items()}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self.metrics.items()})
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.global_step - 1)

    def _find(self, flops: int | None, batch: Any) -> None:
        if not flops:
            warnings.warn(
                "Throughput can't tell the FLOPs of this training_step, and logs no mfu: write flops_per_batch=..., "
                "the number for a batch, forward and backward.",
                stacklevel=1,
            )
            return
        self._flops = flops / max(1, self._samples(batch))

    def _samples(self, batch: Any) -> int:
        if self.samples_fn is not None:
            return int(self.samples_fn(batch))
        return next((x.shape[0] for x in tensors_in(batch) if x.ndim), 0)

    def _tokens(self, batch: Any) -> int:
        if self.tokens_fn is not None:
            return int(self.tokens_fn(batch))
        kinds = (torch.int64, torch.int32)
        return next((x.numel() for x in tensors_in(batch) if x.ndim > 1 and x.dtype in kinds), 0)

    @staticmethod
    def _now(trainer: Any) -> float:
        """Once the device has done what it was given."""
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize(trainer.strategy.root_device)
        return time.perf_counter()


_NOTHING: tuple[int, ...] = (0, 0)  # samples, tokens


def _groups(trainer: Any) -> Groups | None:
    """The mesh axes, under a strategy of this package."""
    groups = getattr(trainer.strategy, "groups", None)
    return groups if isinstance(groups, Groups) else None


def _over_replicas(counts: tuple[int, ...], trainer: Any) -> tuple[int, ...]:
    """The sum of what each replica has seen, of which all its ranks know."""
    groups, strategy = _groups(trainer), trainer.strategy
    told = torch.tensor(counts, device=strategy.root_device)
    if groups is not None:
        return tuple(groups.data.all_reduce_(told, "throughput").tolist())
    if trainer.world_size == 1:
        return counts
    told = strategy.reduce(told, reduce_op="sum")
    shared = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    sharers = trainer.world_size // shared.get("num_replicas", trainer.world_size)
    return tuple(count // sharers for count in told.tolist())


def _dtype(trainer: Any, module: Any) -> torch.dtype:
    """In which most of the products are: by the Trainer's precision, or by the weights where it leaves them alone."""
    named = _DTYPES.get(str(trainer.precision).partition("-")[0])
    if named is not None:
        return named
    weights = [p for p in module.parameters() if p.is_floating_point()]
    return max(weights, key=lambda p: p.numel()).dtype if weights else torch.float32
