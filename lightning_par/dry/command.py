"""The command line of the dry run: ``python -m lightning_par dry-run my_module.py:MyModule ...``."""

from __future__ import annotations

import contextlib
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from typing import Any

from lightning_par.verdict.command import json_dict, load

_EXAMPLE = """example:
  python -m lightning_par dry-run my_module.py:MyModule --batch my_module.py:make_batch \\
      --layout '{"tensor_parallel_size": 8}' --devices 1024 --rank 517 --precision bf16-mixed

exit code: 0, or 2 where the rank can't run so"""


def add_dry_run(commands: Any) -> None:
    """Add the command to the ``commands`` of a parser."""
    dry: ArgumentParser = commands.add_parser(
        "dry-run",
        help="run one rank's training step without values and without other ranks, and count its bytes",
        epilog=_EXAMPLE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    dry.add_argument("module", help="a LightningModule's class, or a function: FILE.py:NAME or PACKAGE.MODULE:NAME")
    dry.add_argument("--batch", required=True, help="a batch or a DataLoader, or a function that makes one: as MODULE")
    dry.add_argument("--layout", type=json_dict, required=True, help="HybridParallelStrategy's arguments in JSON")
    dry.add_argument("--devices", type=int, required=True, help="over all hosts")
    dry.add_argument("--rank", type=int, default=0, help="which of them (default: 0)")
    dry.add_argument("--devices-per-host", type=int, default=8, help="of each host (default: 8)")
    dry.add_argument("--init", type=json_dict, default={}, help="keyword arguments of MODULE, a dict in JSON")
    dry.add_argument("--precision", default="32-true", help="as the Trainer's (default: 32-true)")
    dry.add_argument("--accumulate-grad-batches", type=int, default=1, help="as the Trainer's (default: 1)")
    dry.add_argument("--gradient-clip-val", type=float, help="as the Trainer's (default: none)")
    dry.add_argument("--gradient-clip-algorithm", choices=("norm", "value"), help="as the Trainer's (default: norm)")
    dry.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="whose tensors (default: cpu)")
    dry.add_argument("--json", action="store_true", help="print JSON")
    dry.set_defaults(run=_dry_run)


def _dry_run(asked: Namespace) -> int:
    from lightning_par.dry import dry_run

    with contextlib.redirect_stdout(sys.stderr):  # what the module and the strategy print is no part of the result
        module, batch = load(asked.module), load(asked.batch)
        found = dry_run(
            partial(module, **asked.init) if asked.init else module, batch, asked.layout, devices=asked.devices,
            rank=asked.rank, devices_per_host=asked.devices_per_host, precision=asked.precision,
            accumulate_grad_batches=asked.accumulate_grad_batches, gradient_clip_val=asked.gradient_clip_val,
            gradient_clip_algorithm=asked.gradient_clip_algorithm, accelerator=asked.accelerator,
        )  # fmt: skip
    print(found.json() if asked.json else found, flush=True)
    return 0
