"""Train a case of `models` on one device or under a layout, keep everything that the law names, and compare.

What is compared, and how closely, is said in `lightning_par.verdict.compare`.

Only the Trainer's public surface is used. Gradients, for one, are read from a checkpoint after the first step: there
AdamW's ``exp_avg`` is (1 - beta1) times the clipped gradient, whole, by the parameter's own id.

The reference of a data axis of size d is one device with ``accumulate_grad_batches=d`` over the same batches: its
samples are put in the order in which the distributed sampler hands them to the replicas.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par.sharded.patches.float_casts import all_in_float64
from lightning_par.verdict import compare as verdict
from lightning_par.verdict.compare import TOLERANCE
from lightning_par.verdict.result import Keep, Result, detached
from tests.helpers.accelerator import accelerator, device_type, devices
from tests.helpers.configured import configured
from tests.helpers.models import DRAWING, MODELS

CLIP = 0.05  # bites in every case, so a wrong norm changes every gradient
STEPS = 3
_CASES = MODELS | DRAWING
VAL_BATCHES = 2


def run(
    case: str,
    layout: dict[str, Any] | None = None,
    folder: str | None = None,
    precision: str = "64-true",
    data_size: int = 1,
    accumulate: int = 1,
    clip: float | None = CLIP,
    clip_algorithm: str = "norm",
    steps: int = STEPS,
    eps: float | None = None,
    in_configure_model: bool = False,
    seed: int = 1234,
) -> Result:
    """Fit, validate and predict on this rank.

    Args:
        case: a name in `MODELS` or `DRAWING`.
        layout: arguments of the strategy, ``None`` for one device and a plain Trainer.
        folder: a folder that all ranks share, for checkpoints.
        data_size: size of the data axis; one device accumulates over as many batches instead.
        accumulate: batches that each replica accumulates over.
        eps: AdamW's, where not its default.
        in_configure_model: whether the module builds its layers there.
        seed: of the weights and of what is drawn.
    """
    model = _CASES[case]
    folder = folder or tempfile.mkdtemp()
    batches = accumulate * (1 if layout else data_size)  # in a window, on this rank
    with warnings.catch_warnings(), all_in_float64(model.casts and precision == "64-true"):
        warnings.simplefilter("ignore")
        # Weights and draws come from rank 0, whatever the others would have made.
        torch.manual_seed(seed + int(os.environ.get("RANK", "0")))
        module = configured(model.module) if in_configure_model else model.module()
        if eps is not None:
            module.eps = eps  # type: ignore[assignment]
        keep = _Keep(folder)
        trainer = Trainer(
            **_devices(layout),
            **_precision(precision),
            max_epochs=1,
            limit_train_batches=steps * batches,
            limit_val_batches=VAL_BATCHES * (1 if layout else data_size),
            limit_predict_batches=VAL_BATCHES * (1 if layout else data_size),
            val_check_interval=(steps - 1) * batches,  # a step follows
            num_sanity_val_steps=1,
            accumulate_grad_batches=batches,
            gradient_clip_val=None if model.manual else clip,
            gradient_clip_algorithm=None if model.manual else clip_algorithm,
            callbacks=[keep],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        train, val = (_loader(case, seed, data_size, shuffle=seed == 0, interleave=layout is None) for seed in (0, 1))
        trainer.fit(module, train, val)
        result = keep.result
        result.precision = precision
        result.metrics = detached(trainer.callback_metrics)
        result.predictions = detached(trainer.predict(module, val))
        result.after = detached(module.state_dict())
    return result


def _precision(precision: str) -> dict[str, Any]:
    if precision == "16-mixed":  # by its name the Trainer takes bf16 on a CPU; as a plugin it scales losses
        return dict(plugins=[MixedPrecision("16-mixed", device_type())])
    return dict(precision=precision)


_STRATEGIES = {
    "hybrid": "HybridParallelStrategy",
    "pipeline_parallel_size": "PipelineParallelStrategy",
    "sequence_parallel_size": "SequenceParallelStrategy",
    "placement": "LayerPlacementStrategy",
}
"""An argument that a strategy alone has, and the strategy."""


def _devices(layout: dict[str, Any] | None) -> dict[str, Any]:
    if layout is None:
        return dict(accelerator=accelerator(), devices=1)
    import lightning_par

    kind = next((kind for argument, kind in _STRATEGIES.items() if argument in layout), "TensorParallelStrategy")
    strategy = getattr(lightning_par, kind)(**{name: value for name, value in layout.items() if name != "hybrid"})
    return dict(accelerator=accelerator(), **devices(), strategy=strategy)


def _loader(case: str, seed: int, data_size: int, shuffle: bool, interleave: bool) -> DataLoader:
    samples, batch_size = _CASES[case].data(seed), _CASES[case].batch_size
    if interleave and data_size > 1:
        # Lightning's distributed sampler always shuffles for training.
        replicas = [
            list(DistributedSampler(samples, data_size, replica, shuffle=shuffle, seed=0))  # type: ignore[arg-type]
            for replica in range(data_size)
        ]
        starts = range(0, len(replicas[0]), batch_size)
        samples = [samples[i] for k in starts for replica in replicas for i in replica[k : k + batch_size]]
    return DataLoader(samples, batch_size=batch_size)  # type: ignore[arg-type]


class _Keep(Keep, Callback):
    """Reads gradients from a checkpoint after the first step."""

    def after_first_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint = self.save(trainer, "first.ckpt")
        found = {}
        for i, saved in enumerate(checkpoint.get("optimizer_states", [])):
            betas = {k: group["betas"][0] for group in saved["param_groups"] for k in group["params"]}
            found |= {f"{i}.{k}": state["exp_avg"] / (1 - betas[k]) for k, state in saved["state"].items()}
        names = self.result.names.items()
        self.result.clipped = {f"{key} {name}": found[key] for key, name in names if key in found}


# -------------------------------------------------------------------------------------------------------------- compare


def compare(reference: Result, result: Result, data_size: int = 1, tolerance: float = TOLERANCE) -> list[str]:
    """What breaks the law, one readable line each; empty where nothing does.

    By the convention of `tests.helpers.models`, only `_SYNCED` are logged by step with `sync_dist`.
    """
    return [str(finding) for finding in verdict.compare(reference, result, data_size, tolerance, _SYNCED)]


_SYNCED = ("train_loss", "train_loss_step", "top5")


def compare_low(exact: Result, single: Result, result: Result, data_size: int = 1) -> list[str]:
    """`compare_low_of` one run."""
    return compare_low_of([(exact, single, result)], data_size)


def compare_low_of(runs: Sequence[tuple[Result, Result, Result]], data_size: int = 1, factor: float = 2.0) -> list[str]:
    """Low precision: the error against float64 is at most ``factor`` times one device's own, over all runs together.

    The few losses and metrics may be exact by luck: one device's error on them counts as one rounding at least.

    Args:
        runs: of different seeds: one device in float64, one device in the low precision, and the layout in that.
    """
    found: list[str] = []
    squares: dict[str, list[tuple[float, float]]] = {}
    for exact, single, result in runs:
        exact, single = (
            verdict.expectation(reference, result.replica, data_size, _SYNCED) for reference in (exact, single)
        )
        if result.rank == 0:
            found += map(str, verdict.compare_tensors("initial weight", single.initial, result.initial, 0.0))
        for what, pick in _QUANTITIES.items():
            x, one, other = pick(exact), pick(single), pick(result)
            if result.rank and not other:
                continue  # the first rank has it
            other = {k: v for k, v in other.items() if k in x}  # with a data axis there are metrics beyond the expected
            if one.keys() != other.keys():
                found.append(f"{what}: {sorted(one)} on one device, {sorted(other)} here")
                continue
            own, error = _distance(x, one), _distance(x, other)
            if what == "losses and metrics":
                own = max(own, _UNIT[single.precision] * max(map(verdict.largest, x.values())))
            squares.setdefault(what, []).append((own**2, error**2))
    for what, pairs in squares.items():
        own, error = (sum(side) ** 0.5 for side in zip(*pairs, strict=True))
        if not error <= factor * own:
            found.append(f"{what}: error {error:.2e} against float64, one device's own {own:.2e}")
    return found


_UNIT = {"bf16-mixed": 2**-9, "bf16-true": 2**-9, "16-mixed": 2**-12, "32-true": 2**-25}
_QUANTITIES = {
    "losses and metrics": lambda r: {**verdict.by_index(r.losses), **r.metrics},
    "clipped gradient": lambda r: r.clipped,
    "weights": lambda r: r.checkpoint.get("state_dict", {}),
    "predictions": lambda r: verdict.flat(r.predictions),
}


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Euclidean distance over what ``b`` has of a quantity."""
    squares = [(a[k].double() - x.double()).square().sum().item() for k, x in b.items() if x.is_floating_point()]
    return sum(squares) ** 0.5
