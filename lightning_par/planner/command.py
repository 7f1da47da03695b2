"""The command line of the planner: ``python -m lightning_par plan my_module.py:MyModule ...``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from typing import Any

from lightning_par.verdict.command import json_dict, load

FITS, NOTHING_FITS = 0, 1

_EXAMPLE = """example:
  python -m lightning_par plan my_module.py:MyModule --batch my_module.py:make_batch \\
      --machine 8xH100 --devices 1024 --precision bf16-mixed --init '{"width": 4096}'

exit code: 0 where a layout fits, 1 where none does, 2 where an argument is wrong"""


def add_plan(commands: Any) -> None:
    """Add the command to the ``commands`` of a parser."""
    plan: ArgumentParser = commands.add_parser(
        "plan",
        help="which layouts fit on a machine, and how fast they would be",
        epilog=_EXAMPLE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    plan.add_argument(
        "module", nargs="?", help="a LightningModule's class, or a function: FILE.py:NAME or PACKAGE.MODULE:NAME"
    )
    plan.add_argument(
        "--batch", help="a batch, a DataLoader or a LightningDataModule, or what makes one, called: as MODULE"
    )
    plan.add_argument("--machine", help="e.g. H100, 8xA100-80GB, H200; a YAML; or measure, for this one")
    plan.add_argument("--save-machine", help="write the machine to this YAML, to be given again")
    plan.add_argument("--devices", type=int, help="over all hosts (default: one host's)")
    plan.add_argument("--init", type=json_dict, default={}, help="keyword arguments of MODULE, a dict in JSON")
    plan.add_argument(
        "--config",
        help="a LightningCLI's YAML: the model, its optimizer, the batch, precision, devices, accumulation, the clip",
    )
    plan.add_argument("--layout", type=json_dict, help="HybridParallelStrategy's arguments in JSON: that layout alone")
    plan.add_argument("--precision", help="as the Trainer's (default: 32-true)")
    plan.add_argument("--global-batch", type=int, help="samples of one step of the optimizer over all replicas")
    plan.add_argument("--recompute", default="none", help="none, selective or full (default: none)")
    plan.add_argument("--eager", action="store_true", help="functions run one by one, as without torch.compile")
    plan.add_argument("--gradient-clip-val", type=float, help="as the Trainer's (default: none)")
    plan.add_argument("--gradient-clip-algorithm", choices=("norm", "value"), help="as the Trainer's (default: norm)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=show_plan)


def show_plan(asked: Namespace) -> int:
    """Run the command; returns its exit code."""
    precision, devices, accumulated = asked.precision, asked.devices, None
    clip, algorithm = asked.gradient_clip_val, asked.gradient_clip_algorithm
    from lightning_par.planner import plan
    from lightning_par.planner.recording.given_batch import is_datamodule

    made: Any = load(asked.module) if asked.module else None
    batch = load(asked.batch) if asked.batch else None
    if asked.config:
        from lightning_par.planner.cli_config import read_config

        config = read_config(asked.config, made, batch if is_datamodule(batch) else None)
        made = config.module
        if batch is None or is_datamodule(batch):
            batch = config.data
        precision, devices = precision or config.precision, devices or config.devices
        accumulated = config.accumulated
        clip = config.clip if clip is None else clip
        algorithm = algorithm or config.clip_algorithm
    missing = [n for n, v in (("MODULE", made), ("--batch", batch), ("--machine", asked.machine)) if v is None]
    if missing:
        raise ValueError(f"plan needs {' and '.join(missing)}{_without(asked.config, missing)}")
    if asked.init:
        made = partial(made, **asked.init)
    machine = asked.machine
    if asked.save_machine:
        machine = _saved(machine, devices, asked.save_machine)
    found = plan(
        made, batch, machine, devices=devices, layout=asked.layout, precision=precision or "32-true",
        global_batch=asked.global_batch, recompute=asked.recompute, eager=asked.eager,
        accumulate_grad_batches=accumulated or 1, gradient_clip_val=clip, gradient_clip_algorithm=algorithm,
    )  # fmt: skip
    print(found.json()) if asked.json else found.show()
    return FITS if found.chosen is not None else NOTHING_FITS


def _without(config: str | None, missing: list[str]) -> str:
    """Why a command of which these are ``missing`` can't do without, if there is a ``config``; and what to write."""
    if not config or missing == ["--machine"]:
        return "."
    ways = {"MODULE": "SCRIPT.py:MODEL", "--batch": "--batch SCRIPT.py:DATAMODULE"}
    write = " ".join(way for name, way in ways.items() if name in missing)
    return f", which {config} does not tell: it names no class there. Write plan {write} --config {config}."


def _saved(machine: str, devices: int | None, path: str) -> str:
    """``path``, to which the machine was written; it is measured once."""
    from lightning_par.planner.machine.machines import machine_yaml, read_machine

    if not path.endswith((".yaml", ".yml")):
        raise ValueError(f"--save-machine {path}: a machine is a YAML. Write {path}.yaml.")
    text = machine_yaml(read_machine(machine, devices)[0])
    with open(path, "w") as file:
        file.write(text)
    return path
