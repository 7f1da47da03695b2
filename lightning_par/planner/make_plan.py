"""A plan from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_par.planner.advice import advise, advise_one
from lightning_par.planner.layouts.candidates import RuledOut
from lightning_par.planner.layouts.search import told
from lightning_par.planner.machine.machines import Machine, read_machine
from lightning_par.planner.messages.clipped import Clip
from lightning_par.planner.planner import Planner
from lightning_par.planner.recording.by_hand import refuse_of_trainer
from lightning_par.planner.recording.given_batch import read_batch
from lightning_par.planner.replay.untold import UntoldError
from lightning_par.planner.report import Plan, named

RECOMPUTES = ("none", "selective", "full")


def make_plan(
    module: Any,
    batch: Any,
    machine: str,
    devices: int | None,
    layout: Mapping[str, Any] | None,
    precision: str | int,
    global_batch: int | None,
    recompute: str,
    eager: bool,
    accumulated: int = 1,
    clip: Clip = "",
) -> Plan:
    """See `lightning_par.plan`."""
    if recompute not in RECOMPUTES:
        raise ValueError(f"recompute must be one of {', '.join(map(repr, RECOMPUTES))}, got {recompute!r}.")
    for name, value in (("devices", devices), ("global_batch", global_batch), ("accumulate_grad_batches", accumulated)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive int, got {value!r}.")
    hosts, count = read_machine(machine, devices)
    _check_hosts(count, hosts)
    planner = Planner(module, read_batch(batch), hosts, precision, recompute, hosts.gpu and not eager, clip)  # type: ignore[arg-type]
    refuse_of_trainer(planner.tree.module, accumulated=accumulated)
    title = f"{planner.name} on {count} x {hosts.name}, {planner.precision.name}, recompute {recompute}"
    if layout is not None:
        if global_batch is None and accumulated > 1:
            one_batch = planner.evaluate(planner.as_run(layout, count), count)
            global_batch = round(one_batch.candidate.samples * accumulated)
        one = planner.evaluate(planner.as_run(layout, count, global_batch), count, global_batch)
        try:
            one.sent  # noqa: B018
        except UntoldError as error:
            out = RuledOut(named(one), str(error))
            return Plan((), (out,), title, count, hosts.devices, None, tuple(planner.notes))
        help_ = None if one.fits else advise_one(planner, one, count, global_batch)
        return Plan((one,), (), title, count, hosts.devices, help_, tuple(planner.notes))
    samples = global_batch or planner.step.samples * count * accumulated
    found = told(planner, count, samples)
    title += f", {samples} samples a step"
    advice = None
    if found.priced and not found.priced[0].fits:
        advice = advise(planner, found.priced[0], count, samples)
    return Plan(found.priced, found.ruled_out, title, count, hosts.devices, advice, tuple(planner.notes))


def _check_hosts(devices: int, hosts: Machine) -> None:
    """Raises ValueError where ``devices`` leave a host with fewer than the others: a Trainer starts as many on each."""
    on_host, left = hosts.devices, devices % hosts.devices
    if devices > on_host and left:
        even = max(n for n in range(1, on_host) if devices % n == 0)
        raise ValueError(
            f"devices={devices} do not fill hosts of {on_host}, and a Trainer starts as many processes on each host. "
            f"Write devices={devices - left} or {devices - left + on_host}, or {even}x before the machine's name for "
            f"{devices // even} hosts of {even}."
        )
