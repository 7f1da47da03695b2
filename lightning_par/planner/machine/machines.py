"""Machines: what a device and its links do, from data sheets and public microbenchmarks.

A constant belongs to a machine, never to a model or to a run. `peak`, `memory`, `bandwidth` and `units` are of data
sheets. Set by hand so that the published runs of `tests/planner/measured.json` come out are `product_share` and `ramp`
of each machine, `contention`, and `attention_share`; how sets of runs are predicted that had no say in them is told by
``python -m tests.planner.left_out``. Bandwidths of links are as recalled from the sources named, to be looked up.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning_par.planner.machine.overheads import Overhead, Overheads

GB, GiB, TFLOPS = 1e9, 2**30, 1e12
MEASURE = "measure"


@dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        bandwidth: bytes a second that one device sends, while it receives as many.
        latency: seconds for each step of a ring.
        ramp: bytes of a message that reaches half of the bandwidth.
        gather: of `bandwidth` that an all-gather reaches.
        scatter: of `bandwidth` that a reduce-scatter reaches.
    """

    bandwidth: float
    latency: float
    ramp: float
    gather: float = 1.0
    scatter: float = 1.0


@dataclass(frozen=True)
class Machine:
    """Hosts of equal devices.

    Attributes:
        name: as in ``--machine``.
        peak: FLOP/s of products of matrices by the name of their dtype, dense, as the data sheet has it.
        memory: bytes that a device has.
        bandwidth: bytes a second between a device and its memory, as the data sheet has it.
        units: processors that each compute a tile of a product at a time.
        devices: on one host.
        link: between the devices of a host.
        network: between hosts, for each device.
        product_share: of `peak` that large products reach, under the device's power limit.
        ramp: of the length of a product's sum: what a tile takes to fill its pipeline and to write its result.
        attention_share: of `peak` that fused attention reaches, forward and backward, at long sequences.
        bandwidth_share: of `bandwidth` that kernels reach which do little beside reading and writing.
        update_share: of `bandwidth` that the optimizer's step reaches; 0: as much.
        launch: seconds that every kernel takes beside its work.
        host: seconds that Python takes to start one function, where the device does not wait for anything else.
        context: bytes that the driver and libraries take for themselves.
        fragmentation: bytes that the allocator holds, by bytes that it was asked for.
        gpu: whether functions are fused, and masks of dropout take a byte.
        contention: of the processors, those that move messages, and are not there for products meanwhile.
        tiles: rows and columns of a product that a unit computes at a time; None has a GPU's.
        cores: ranks of a host that can compute at full speed at once; 0: all of them. The rates are those of a rank
            while all compute.
        overheads: seconds of Python that nothing hides, by axis.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    units: int
    devices: int
    link: Link
    network: Link
    product_share: float
    attention_share: tuple[float, float]
    ramp: int = 256
    bandwidth_share: float = 0.85
    update_share: float = 0.0
    launch: float = 4e-6
    host: float = 8e-6
    context: float = 0.6 * GiB
    fragmentation: float = 1.05
    gpu: bool = True
    contention: float = 0.15
    tiles: tuple[int, int] | None = None
    cores: float = 0.0
    overheads: Overheads = field(default=Overheads())
    aliases: tuple[str, ...] = field(default=())


# NCCL's bus bandwidth of 8 devices, and the message that reaches half of it (nccl-tests on DGX A100 and H100: 230 to
# 240 and 360 to 480 GB/s at 1 GB and beyond, the more where the switch sums).
_NVLINK3 = Link(bandwidth=235e9, latency=3e-6, ramp=4e6)
_NVLINK4 = Link(bandwidth=370e9, latency=3e-6, ramp=6e6)
# An InfiniBand or RoCE port for each device, 200 Gb/s (DGX A100) and 400 Gb/s (DGX H100), of which NCCL moves 90 %.
_HDR = Link(bandwidth=22e9, latency=8e-6, ramp=1e6)
_NDR = Link(bandwidth=44e9, latency=8e-6, ramp=2e6)

_A100 = Machine(
    name="A100-80GB-SXM",
    peak={"float16": 312e12, "bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12},
    memory=80 * GiB,
    bandwidth=2039e9,
    units=108,
    devices=8,
    link=_NVLINK3,
    network=_HDR,
    product_share=0.80,
    attention_share=(0.45, 0.39),
    aliases=("A100", "A100-80GB", "DGX-A100", "A100-SXM"),
)
_H100 = Machine(
    name="H100-80GB-SXM",
    peak={
        "float8": 1979e12, "float16": 989.4e12, "bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12,
        "float64": 66.9e12,
    },
    memory=80 * GiB,
    bandwidth=3352e9,
    units=132,
    devices=8,
    link=_NVLINK4,
    network=_NDR,
    product_share=0.66,
    ramp=800,
    attention_share=(0.27, 0.22),
    aliases=("H100", "H100-SXM", "H100-80GB", "DGX-H100"),
)  # fmt: skip

PRESETS: dict[str, Machine] = {
    one.name: one
    for one in (
        _A100,
        replace(_A100, name="A100-40GB-SXM", memory=40 * GiB, bandwidth=1555e9, aliases=("A100-40GB",)),
        _H100,
        replace(_H100, name="H100-96GB-HBM2e-500W", memory=95 * GiB, bandwidth=2400e9, product_share=0.60,
                attention_share=(0.25, 0.21), aliases=("H100-96GB", "H100-HBM2e")),
        replace(_H100, name="H200-141GB-SXM", memory=141e9, bandwidth=4800e9, product_share=0.69,
                aliases=("H200", "H200-SXM")),
    )
}  # fmt: skip


def read_machine(text: str, devices: int | None = None) -> tuple[Machine, int]:
    """The machine that ``text`` names, and how many devices there are.

    Args:
        text: a preset such as ``"H100"``, or with the devices of a host ``"8xH100"``, or the path of a YAML, or
            ``"measure"``: this one, see `lightning_par.planner.machine.probe`.
        devices: over all hosts; None takes one host.

    Raises:
        ValueError: there is none of that name; the message has the nearest. Or it can't be measured.

    Example::

        machine, devices = read_machine("8xH100", 1024)
        assert machine.devices == 8 and devices == 1024
    """
    if text.endswith((".yaml", ".yml")):
        machine = _from_yaml(Path(text))
    else:
        match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.+)", text.strip())
        assert match is not None
        if match[2].lower() == MEASURE:
            from lightning_par.planner.machine.probe import measure

            machine = measure(int(match[1]) if match[1] else devices)
            return machine, devices or machine.devices
        machine = _preset(match[2])
        if match[1]:
            machine = replace(machine, devices=int(match[1]))
    return machine, devices or machine.devices


def _preset(name: str) -> Machine:
    known = {alias.lower(): one for one in PRESETS.values() for alias in (one.name, *one.aliases)}
    found = known.get(name.lower().replace("_", "-").removeprefix("nvidia-"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.3)
        names = dict.fromkeys(known[x].name for x in near) or dict.fromkeys(one.name for one in PRESETS.values())
        raise ValueError(
            f"There is no machine {name!r}. Write one of {', '.join(map(repr, names))}, 8x before it for the devices "
            "of a host, the path of a YAML of your own, or 'measure' for this one."
        )
    return found


def _from_yaml(path: Path) -> Machine:
    import yaml

    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    given: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    base = _preset(given.pop("like")) if "like" in given else None
    known = {f.name for f in fields(Machine)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"{path}: there is no {unknown[0]!r}; a machine has {', '.join(sorted(known))}, and 'like'.")
    for name in ("link", "network"):
        if isinstance(given.get(name), dict):
            old = asdict(getattr(base, name)) if base is not None else {}
            given[name] = Link(**{**old, **given[name]})
    for name in ("attention_share", "tiles"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    if "overheads" in given:
        given["overheads"] = Overheads(**{axis: Overhead(**one) for axis, one in given["overheads"].items()})
    if base is not None:
        return replace(base, **{"name": path.stem, "aliases": (), **given})
    missing = sorted(f.name for f in fields(Machine) if f.name not in given and f.name in _NEEDED)
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing. Write them, or like: H100 for what is as there.")
    return Machine(**given)


def machine_yaml(machine: Machine) -> str:
    """``machine`` as a YAML that `read_machine` takes.

    Example::

        Path("mine.yaml").write_text(machine_yaml(machine))
        assert read_machine("mine.yaml")[0] == machine
    """
    import yaml

    told = {name: x for name, x in asdict(machine).items() if name != "aliases" and x is not None}
    plain = {name: list(x) if isinstance(x, tuple) else x for name, x in told.items()}
    return str(yaml.safe_dump(plain, sort_keys=False))


_NEEDED = ("name", "peak", "memory", "bandwidth", "units", "devices", "link", "network", "product_share",
           "attention_share")  # fmt: skip
