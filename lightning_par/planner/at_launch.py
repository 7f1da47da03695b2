"""The layout that a run takes by itself: planned on one rank as it starts, by the batch that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_par.planner.layouts.candidates import Launched
from lightning_par.planner.layouts.search import search
from lightning_par.planner.machine.machines import PRESETS, Machine, read_machine
from lightning_par.planner.messages.clipped import Clip
from lightning_par.planner.planner import Planner
from lightning_par.planner.prediction import Prediction
from lightning_par.planner.report import named
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.strategies.startup_table import bytes_text

HEADER = ("", "layout", "step", "peak", "fits")


@dataclass(frozen=True)
class Choice:
    """A layout for a run.

    Attributes:
        arguments: `HybridParallelStrategy`'s.
        accumulated: training steps for each step of the optimizer.
        devices: of the run that it was made for.
        global_batch: samples of a step of the optimizer that replicas share; None: there is one replica.
        title: of what is shown.
        rows: the choice and the runner-up, as `HEADER`.
        notes: below them.
    """

    arguments: Mapping[str, Any]
    accumulated: int
    devices: int
    global_batch: int | None = None
    title: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def saved(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        told = {name: getattr(self, name) for name in ("accumulated", "devices", "global_batch")}
        return {"arguments": dict(self.arguments), **told}

    @classmethod
    def of_saved(cls, saved: Any, devices: int, global_batch: int | None) -> Choice | None:
        """What `saved` kept, if it was for as many devices and samples of a step."""
        if not isinstance(saved, Mapping) or (saved["devices"], saved["global_batch"]) != (devices, global_batch):
            return None
        title = f"auto_parallel goes on as its checkpoint was trained, on {devices} devices"
        return cls(dict(saved["arguments"]), int(saved["accumulated"]), devices, global_batch, title)


def choose(
    module: Any, batch: Any, machine: Machine, devices: int, precision: str, accumulated: int,
    global_batch: int | None, pipelines: bool, clip: Clip = "",
) -> Choice:  # fmt: skip
    """The fastest layout that fits, by prediction; the tensor axis takes all devices where none can be planned.

    Args:
        module: the LightningModule, which is left as it is.
        batch: the first one of the run.
        machine: the hosts.
        devices: over all hosts.
        precision: the Trainer's.
        accumulated: its ``accumulate_grad_batches``.
        global_batch: samples of one step of the optimizer, to be shared by any number of replicas; None leaves each
            batch to one replica.
        pipelines: whether layers may run in stages.
        clip: of gradients.

    Raises:
        ValueError: ``global_batch`` is no multiple of the batch's samples, or there is no batch.
    """
    if global_batch is not None:
        accumulated = _accumulated(batch, global_batch)
    if devices == 1:
        return Choice({}, accumulated, devices, global_batch)
    if batch is None:
        return _fallback(devices, accumulated, global_batch, "there is no first batch to plan by")
    try:
        planner = Planner(module, tree_map(_on_host, batch), machine, precision, fused=machine.gpu, clip=clip)
        own = planner.step.samples
        launched = Launched(own, 1 if global_batch is None else None, pipelines)
        found = search(planner, devices, own * accumulated, launched)
    except Exception as error:  # whatever a step does that can't be planned may still run
        return _fallback(devices, accumulated, global_batch, str(error) or type(error).__name__)
    if not found.priced:
        reasons = "; ".join(f"{one.layout}: {one.reason}" for one in found.ruled_out)
        return _fallback(devices, accumulated, global_batch, reasons or "no layout is possible")
    best, *others = found.priced
    notes: tuple[str, ...] = () if best.fits else (
        f"No layout is predicted to fit: this one lacks {bytes_text(best.peak - best.memory)} on a device. "
        "`python -m lightning_par plan` says what would help.",
    )  # fmt: skip
    if global_batch is None:
        notes += (
            "A step is on the batches of one device: replicas would each add theirs. With global_batch=N, samples of a "
            "step, they share them.",
        )
    title = f"auto_parallel, predicted for {devices} x {machine.name}, {planner.precision.name}"
    rows = tuple(_row(mark, one) for mark, one in zip(("chosen", "runner-up"), (best, *others[:1])))
    return Choice(best.candidate.arguments(), best.candidate.accumulated, devices, global_batch, title, rows, notes)


def machine_at_hand(asked: str, device: torch.device, on_host: int) -> Machine:
    """The machine of a run.

    Args:
        asked: ``"auto"``: a preset by the GPU's name, else a probe; or as `read_machine` takes it.
        device: this rank's.
        on_host: ranks of a host.
    """
    if asked == "auto":
        known = None
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            known = preset_of(properties.name, properties.total_memory)
        if known is not None:
            return replace(known, devices=on_host)
        asked = "measure"
    machine, _ = read_machine(asked, on_host)
    return replace(machine, devices=on_host)


def preset_of(name: str, memory: float) -> Machine | None:
    """The preset of a GPU, by what its driver calls it and its bytes; None where there is none.

    Example::

        assert preset_of("NVIDIA A100-SXM4-40GB", 42e9).name == "A100-40GB-SXM"
    """
    if "PCI" in name or "NVL" in name or "MIG" in name:
        return None  # of other rates and links
    words = name.upper().replace("-", " ").split()
    alike = [one for one in PRESETS.values() if one.name.split("-")[0] in words]
    return min(alike, key=lambda one: abs(one.memory - memory), default=None)


def _fallback(devices: int, accumulated: int, global_batch: int | None, why: str) -> Choice:
    note = f"Not planned, so the tensor axis takes all devices: {why}"
    return Choice({"tensor_parallel_size": devices}, accumulated, devices, global_batch, "auto_parallel", (), (note,))


def _row(mark: str, one: Prediction) -> tuple[str, ...]:
    return mark, named(one), f"{one.seconds:.3g} s", bytes_text(one.peak), "yes" if one.fits else "no"


def _accumulated(batch: Any, global_batch: int) -> int:
    """How many batches such as this one ``global_batch`` samples are."""
    own = next((int(x.shape[0]) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim), None)
    if own is None:
        raise ValueError(f"global_batch={global_batch}: there is no first batch whose samples could be counted.")
    if global_batch % own:
        near = max(1, round(global_batch / own)) * own
        raise ValueError(
            f"global_batch={global_batch} is no multiple of the {own} samples that the DataLoader gives at a time. "
            f"Write global_batch={near}, or another batch_size in the DataLoader."
        )
    return global_batch // own


def _on_host(x: Any) -> Any:
    return x.detach().cpu() if isinstance(x, Tensor) else x
