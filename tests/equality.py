"""Train a case of `tests.models` on one device or under a layout, keep everything that the law names, and compare.

The law: a layout changes speed and memory, never results. In float64 two values agree where
|a - b| <= 1e-9 * max(largest |entry| of that tensor, largest |entry| of that quantity in the model); initial weights
agree bitwise.

Only the Trainer's public surface is used. Gradients, for one, are read from a checkpoint after the first step: there
AdamW's ``exp_avg`` is (1 - beta1) times the clipped gradient, whole, by the parameter's own id.

The reference of a data axis of size d is one device with ``accumulate_grad_batches=d`` over the same batches: its
samples are put in the order in which the distributed sampler hands them to the replicas.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.configured import configured
from tests.models import MODELS

CLIP = 0.05  # bites in every case, so a wrong norm changes every gradient
STEPS = 4
VAL_BATCHES = 2


@dataclass
class Result:
    """What one rank saw. ``initial``, ``gradients`` and ``checkpoint`` may be empty on ranks other than 0."""

    rank: int = 0
    replica: int = 0
    precision: str = ""
    names: dict[str, str] = field(default_factory=dict)  # "optimizer.id" -> the parameter's name
    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)  # one a batch
    step_metrics: list[dict[str, Tensor]] = field(default_factory=list)  # `callback_metrics` after each batch
    metrics: dict[str, Tensor] = field(default_factory=dict)  # `callback_metrics` after the fit
    learning_rates: list[list[float]] = field(default_factory=list)  # one list a batch
    gradients: dict[str, Tensor] = field(default_factory=dict)  # clipped, of the first step
    checkpoint: dict[str, Any] = field(default_factory=dict)
    predictions: list[Any] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)  # the module's own state dict once all is over


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
) -> Result:
    """Fit, validate and predict on this rank.

    Args:
        case: a name in `MODELS`.
        layout: arguments of the strategy, ``None`` for one device and a plain Trainer.
        folder: a folder that all ranks share, for checkpoints.
        data_size: size of the data axis; one device accumulates over as many batches instead.
        accumulate: batches that each replica accumulates over.
        eps: AdamW's, where not its default.
        in_configure_model: whether the module builds its layers there.
    """
    model = MODELS[case]
    folder = folder or tempfile.mkdtemp()
    batches = accumulate * (1 if layout else data_size)  # in a window, on this rank
    with warnings.catch_warnings(), _all_in_float64(model.casts and precision == "64-true"):
        warnings.simplefilter("ignore")
        # Weights and draws come from rank 0, whatever the others would have made.
        torch.manual_seed(1234 + int(os.environ.get("RANK", "0")))
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
            val_check_interval=steps * batches // 2,
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
        result.metrics = _detached(trainer.callback_metrics)
        result.predictions = _detached(trainer.predict(module, val))
        result.after = _detached(module.state_dict())
    return result


def _all_in_float64(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Hugging Face takes the loss of ``logits.float()``: wrong arithmetic could hide behind float32's rounding."""
    return mock.patch.object(Tensor, "float", Tensor.double) if wanted else contextlib.nullcontext()


def _precision(precision: str) -> dict[str, Any]:
    if precision == "16-mixed":  # by its name the Trainer takes bf16 on a CPU; as a plugin it scales losses
        return dict(plugins=[MixedPrecision("16-mixed", "cpu")])
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
        return dict(accelerator="cpu", devices=1)
    import lightning_par

    kind = next((kind for argument, kind in _STRATEGIES.items() if argument in layout), "TensorParallelStrategy")
    strategy = getattr(lightning_par, kind)(**{name: value for name, value in layout.items() if name != "hybrid"})
    return dict(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)


def _loader(case: str, seed: int, data_size: int, shuffle: bool, interleave: bool) -> DataLoader:
    samples, batch_size = MODELS[case].data(seed), MODELS[case].batch_size
    if interleave and data_size > 1:
        # Lightning's distributed sampler always shuffles for training.
        replicas = [
            list(DistributedSampler(samples, data_size, replica, shuffle=shuffle, seed=0))  # type: ignore[arg-type]
            for replica in range(data_size)
        ]
        starts = range(0, len(replicas[0]), batch_size)
        samples = [samples[i] for k in starts for replica in replicas for i in replica[k : k + batch_size]]
    return DataLoader(samples, batch_size=batch_size)  # type: ignore[arg-type]


class _Keep(Callback):
    """Writes down what happens."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.result = Result()
        self.stepped = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0}
        self.result.rank, self.result.replica = trainer.global_rank, sampler["rank"]
        self.result.initial = _detached(trainer.strategy.lightning_module_state_dict())
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for i, optimizer in enumerate(trainer.optimizers):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.result.names |= {f"{i}.{k}": names.get(id(p), "?") for k, p in enumerate(params)}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else torch.zeros(())
        self.result.losses.append(_detached(loss) * trainer.accumulate_grad_batches)
        self.result.step_metrics.append(_detached(trainer.callback_metrics))
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.result.learning_rates.append([group["lr"] for group in groups])
        if trainer.global_step and not self.stepped:
            self.stepped = True
            checkpoint = self._save(trainer, "first.ckpt")
            for i, saved in enumerate(checkpoint.get("optimizer_states", [])):
                betas = {k: group["betas"][0] for group in saved["param_groups"] for k in group["params"]}
                for k, state in saved["state"].items():
                    self.result.gradients[f"{i}.{k}"] = state["exp_avg"] / (1 - betas[k])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.result.checkpoint = self._save(trainer, "last.ckpt")

    def _save(self, trainer: Trainer, name: str) -> dict[str, Any]:
        trainer.save_checkpoint(self.folder / name)
        if not trainer.is_global_zero:
            return {}
        return torch.load(self.folder / name, weights_only=False)


def _detached(value: Any) -> Any:
    """A copy of nested tensors; their types stay, so that a value that is no plain tensor is found out."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detached(v) for v in value]
    return value


# -------------------------------------------------------------------------------------------------------------- compare


def compare(reference: Result, result: Result, data_size: int = 1, tolerance: float = 1e-9) -> list[str]:
    """What breaks the law, one readable line each; empty where nothing does."""
    found: list[str] = []
    expected = expectation(reference, result.replica, data_size)
    main = result.rank == 0
    # Other ranks may leave out what they don't hold, or put meta tensors there.
    initial = {
        k: v for k, v in expected.initial.items() if main or (k in result.initial and _is_here(result.initial[k]))
    }
    here = {k: v for k, v in result.initial.items() if main or _is_here(v)}
    found += _compare_tensors("initial weight", initial, here, 0.0)
    found += _compare_tensors("loss", _by_index(expected.losses), _by_index(result.losses), tolerance)
    if main:
        a, b = (
            {f"{k} {name}": r.gradients[k] for k, name in reference.names.items() if k in r.gradients}
            for r in (expected, result)
        )
        found += _compare_tensors("clipped gradient", a, b, tolerance)
    for step, (a, b) in enumerate(zip(expected.step_metrics, result.step_metrics, strict=True)):
        found += _compare_metrics(f"logged after batch {step}", a, b, tolerance, extra=data_size == 1)
    found += _compare_metrics("callback_metrics", expected.metrics, result.metrics, tolerance, extra=data_size == 1)
    if expected.learning_rates != result.learning_rates:
        found.append(f"learning rates: {expected.learning_rates} != {result.learning_rates}")
    found += _compare_tensors("prediction", _flat(expected.predictions), _flat(result.predictions), tolerance)
    if main:
        found += _compare_checkpoints(expected.checkpoint, result.checkpoint, tolerance)
    found += _compare_tensors("weight after all", expected.after, result.after, tolerance)
    return found


def expectation(reference: Result, replica: int, data_size: int) -> Result:
    """What the given replica has to see, from one device that ran through all replicas' batches in turn.

    Under data parallelism each replica has the losses and predictions of its own batches. By the convention of
    `tests.models`, only `_SYNCED` are logged by step with `sync_dist`: the mean over the replicas.
    """
    if data_size == 1:
        return reference
    steps = []
    for i in range(0, len(reference.step_metrics), data_size):
        window = reference.step_metrics[i : i + data_size]
        steps.append(
            {
                key: torch.stack([m[key] for m in window]).mean() if key in _SYNCED else own
                for key, own in window[replica].items()
            }
        )
    last = reference.step_metrics[-1]  # the final metrics of a step are compared there
    of_step = {k for k in last if not k.startswith("val_") and f"{k}_step" not in last}
    return Result(
        replica=replica,
        initial=reference.initial,
        losses=reference.losses[replica::data_size],
        step_metrics=steps,
        precision=reference.precision,
        metrics={k: v for k, v in reference.metrics.items() if k not in of_step},
        learning_rates=reference.learning_rates[data_size - 1 :: data_size],
        gradients=reference.gradients,
        checkpoint=reference.checkpoint,
        predictions=reference.predictions[replica::data_size],
        after=reference.after,
    )


def _is_here(x: Tensor) -> bool:
    return x.device.type != "meta"


_SYNCED = ("train_loss", "train_loss_step", "top5")


def _by_index(values: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): value for i, value in enumerate(values)}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, inner in enumerate(value) for k, v in _flat(inner, f"{prefix}.{i}").items()}
    return {prefix.removeprefix("."): value}


def _compare_metrics(what: str, a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float, extra: bool) -> list[str]:
    """Every metric is its own quantity. With ``extra``, what is logged beyond the expected is found too."""
    found = [f"{what}: {name!r} is missing" for name in a if name not in b]
    found += [f"{what}: {name!r} is not logged on one device" for name in b if extra and name not in a]
    for name in a:
        if name in b:
            found += _compare_tensors(what, {name: a[name]}, {name: b[name]}, tolerance)
    return found


def _compare_tensors(what: str, a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[str]:
    """Compare one quantity: names, types, dtypes, shapes, values."""
    if list(a) != list(b):
        missing, extra = [k for k in a if k not in b], [k for k in b if k not in a]
        return [f"{what}: names differ: missing {missing}, extra {extra}" + ("" if missing or extra else ", order")]
    found = []
    largest = max((_largest(x) for x in a.values() if isinstance(x, Tensor)), default=0.0)
    for name, x in a.items():
        y = b[name]
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if type(x) is not type(y) or x != y:
                found.append(f"{what} {name}: {x!r} != {y!r}")
        elif type(y) not in (Tensor, torch.nn.Parameter):
            found.append(f"{what} {name}: is a {type(y).__name__}, not a plain tensor")
        elif x.device != y.device:
            found.append(f"{what} {name}: is on {y.device}, not {x.device}")
        elif x.dtype != y.dtype or x.shape != y.shape:
            found.append(f"{what} {name}: {x.dtype} {tuple(x.shape)} != {y.dtype} {tuple(y.shape)}")
        elif tolerance == 0.0 or not (x.is_floating_point() or x.is_complex()):
            if not torch.equal(x, y):
                found.append(f"{what} {name}: not equal, {int((x != y).sum())} of {x.numel()} entries")
        elif x.numel():
            bound = tolerance * max(_largest(x), largest)
            differences = (x - y).abs()
            differences[(x == y) | (x.isnan() & y.isnan())] = 0.0  # infinities of one sign
            error = differences.nan_to_num(nan=float("inf")).max().item()
            if error > bound:
                found.append(f"{what} {name}: error {error:.2e}, bound {bound:.2e}")
    return found


def _largest(x: Tensor) -> float:
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return x.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _compare_checkpoints(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[str]:
    found = []
    if set(a) != set(b):
        found.append(f"checkpoint keys: {sorted(a)} != {sorted(b)}")
        return found
    found += _compare_tensors("weight", a["state_dict"], b["state_dict"], tolerance)
    for key in ("epoch", "global_step", "lr_schedulers"):
        if a[key] != b[key]:
            found.append(f"checkpoint {key}: {a[key]} != {b[key]}")
    if len(a["optimizer_states"]) != len(b["optimizer_states"]):
        return [*found, "checkpoint: number of optimizers differs"]
    for i, (one, other) in enumerate(zip(a["optimizer_states"], b["optimizer_states"])):
        if one["param_groups"] != other["param_groups"]:
            found.append(f"optimizer {i} param_groups: {one['param_groups']} != {other['param_groups']}")
        kinds = list(dict.fromkeys(kind for state in one["state"].values() for kind in state))
        for kind in kinds:
            x, y = (
                {str(k): state[kind] for k, state in sorted(optimizer["state"].items()) if kind in state}
                for optimizer in (one, other)
            )
            found += _compare_tensors(f"optimizer {i} {kind}", x, y, tolerance)
    return found


def compare_low(exact: Result, single: Result, result: Result, data_size: int = 1, factor: float = 2.0) -> list[str]:
    """Low precision: the error against float64 is at most ``factor`` times one device's own.

    The few losses and metrics may be exact by luck: one device's error on them counts as one rounding at least.

    Args:
        exact: one device in float64.
        single: one device in the low precision.
        result: the layout in the low precision.
    """
    found = []
    exact, single = (expectation(reference, result.replica, data_size) for reference in (exact, single))
    if result.rank == 0:
        found += _compare_tensors("initial weight", single.initial, result.initial, 0.0)
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
            own = max(own, _UNIT[single.precision] * max(map(_largest, x.values())))
        if not error <= factor * own:
            found.append(f"{what}: error {error:.2e} against float64, one device's own {own:.2e}")
    return found


_UNIT = {"bf16-mixed": 2**-9, "bf16-true": 2**-9, "16-mixed": 2**-12, "32-true": 2**-25}
_QUANTITIES = {
    "losses and metrics": lambda r: {**_by_index(r.losses), **r.metrics},
    "clipped gradient": lambda r: r.gradients,
    "weights": lambda r: r.checkpoint.get("state_dict", {}),
    "predictions": lambda r: _flat(r.predictions),
}


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Euclidean distance over what ``b`` has of a quantity."""
    squares = [(a[k].double() - x.double()).square().sum().item() for k, x in b.items() if x.is_floating_point()]
    return sum(squares) ** 0.5
