"""A probe of the machine at hand: what its ranks reach while all of them run, in a minute or so.

It runs in processes of its own, so that nothing is left of it: ``python -m lightning_par.planner.machine.probe`` forks
as many ranks as will run, which measure kernels and messages at the same time (`rank_probe`), and train a small module
under each axis (`reference_step`), since what Python takes in a step hides behind nothing on CPUs.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_par.planner.machine.machines import Link, Machine
from lightning_par.planner.machine.overheads import Overhead, Overheads
from lightning_par.planner.machine.rank_probe import DeviceRates, LinkRates, device_rates, link_rates
from lightning_par.planner.machine.reference_step import StepTimes, fitted, reference_runs, train
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

PATIENCE = 240.0
"""Seconds until a probe that is not done has failed: a busy machine may take its time."""


UPDATE_BYTES = 28
"""For each element in single precision under AdamW without a clip: see `lightning_par.planner.times.layout_work`."""


@dataclass(frozen=True)
class RankFound:
    """What one rank measured.

    Attributes:
        name: of the device.
        units: processors of it, if it is a GPU.
        memory: bytes that it has for this rank.
        context: bytes that a rank takes before it has a model.
        rates: of the device.
        links: between the ranks; None where there is one.
        times: of the reference module's steps; none where devices work while Python does.
    """

    name: str
    units: int
    memory: float
    context: float
    rates: DeviceRates
    links: LinkRates | None
    times: list[StepTimes]


def measure(devices: int | None = None) -> Machine:
    """This machine, as a host of ``devices`` ranks; None takes its GPUs, or as many ranks as processors.

    Raises:
        ValueError: it can't be measured; the message says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "found"
        command = [sys.executable, "-m", __name__, str(devices or 0), str(answer)]
        launched = ("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_",
                    "PL_")  # fmt: skip
        env = {name: x for name, x in os.environ.items() if not name.startswith(launched)}
        env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise ValueError(f"The probe of this machine was not done after {PATIENCE:g} s.") from None
        if ended.returncode or not answer.exists():
            last = (ended.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            raise ValueError(f"This machine can't be measured: {last}")
        kind, found = pickle.loads(answer.read_bytes())  # of a process of our own, in a folder of our own
    return _machine(kind, found)


def _machine(kind: str, found: list[RankFound]) -> Machine:
    """What the ranks found, put together; pure, but for the planner that fits the overheads."""
    ranks, first, gpu = len(found), found[0], kind == "cuda"
    rates = [one.rates for one in found]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    peak = {name: mean([one.peak[name] for one in rates]) for name in rates[0].peak}
    bandwidth = mean([one.bandwidth for one in rates])
    attention = "bfloat16" if gpu else "float32"
    shares = tuple(mean([one.attention[i] for one in rates]) / peak[attention] for i in (0, 1))
    link, told = Link(bandwidth, 0.0, 0.0), first.links
    if told is not None:
        link = Link(told.bandwidth, told.latency, 0.0, told.gather, told.scatter)
    shared = not gpu and _processors() < ranks
    update = Overhead(0.0, 0.0 if gpu else mean([one.parameter for one in rates]))
    machine = Machine(
        name=first.name,
        peak=peak,
        memory=min(one.memory for one in found),
        bandwidth=bandwidth,
        units=first.units,
        devices=ranks,
        link=link,
        network=link,
        product_share=1.0,
        attention_share=(shares[0], shares[1]),
        ramp=256 if gpu else rates[0].ramp,
        bandwidth_share=mean([one.walk for one in rates]) / bandwidth,
        update_share=UPDATE_BYTES / (bandwidth * mean([one.element for one in rates])),
        launch=4e-6 if gpu else 0.0,
        context=max(one.context for one in found),
        fragmentation=1.05 if gpu else 1.02,
        gpu=gpu,
        contention=0.15 if gpu else 1.0,
        tiles=None if gpu else (16, 16),
        cores=float(_processors()) if shared else 0.0,
        overheads=Overheads(update=update),
    )
    return fitted(machine, ranks, _namespace(), first.times) if first.times else machine


def _namespace() -> Namespace:
    return LIGHTNING if find_spec("lightning") is not None else PYTORCH_LIGHTNING


def _find(kind: str, ranks: int, memory: float) -> RankFound:
    """On one rank."""
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    rates = device_rates(device)
    links = link_rates(device) if ranks > 1 else None
    name, units, context = f"this machine's {ranks} CPU ranks", 1, _resident()
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, whole = torch.cuda.mem_get_info(device)
        name, units, memory = f"{properties.name} (measured)", properties.multi_processor_count, float(whole)
        context = float(whole - free - torch.cuda.memory_reserved(device))
    times = []
    if kind == "cpu":
        times = [train(run, ranks, _namespace(), "cpu") for run in reference_runs(ranks)]
    return RankFound(name, units, memory, context, rates, links, times)


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _available() -> float:
    """Bytes that this host's memory has room for."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    known = {line.split(":")[0]: float(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    return known.get("MemAvailable", float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def _processors() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> int:
    """Counted by NVML where that is there: a fork of a process that has begun the driver can't use it."""
    import torch

    return torch.cuda.device_count() if Path("/dev/nvidiactl").exists() else 0


def main(arguments: list[str]) -> None:
    """Fork the ranks and write what they found."""
    from functools import partial

    from lightning_par.verdict.processes import run_ranks

    asked, answer = int(arguments[0]), arguments[1]
    gpus = _gpus()
    kind, ranks = ("cuda", min(asked or gpus, gpus)) if gpus else ("cpu", asked or _processors())
    with tempfile.TemporaryDirectory() as folder:
        found: list[Any] = run_ranks(ranks, partial(_find, kind, ranks, _available() / ranks), folder, PATIENCE)
    Path(answer).write_bytes(pickle.dumps((kind, found)))


if __name__ == "__main__":
    from lightning_par.planner.machine.probe import (
        main as run_main,  # so that what is pickled is known by a module's name
    )

    run_main(sys.argv[1:])
