"""The verdict on a user's own module: whether layouts leave its results as they are.

`train` runs a few steps and `result` says what is kept of them, `compare` what differs; `layouts` reads what is asked
for, `judge` runs it in `processes`, `report` shows what came of it; `command` is the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from lightning_par.python_state import generators
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.namespace import Namespace, namespace_of
from lightning_par.verdict.compare import Finding as Finding
from lightning_par.verdict.fresh import judge_fresh
from lightning_par.verdict.layouts import read_layouts
from lightning_par.verdict.report import LayoutVerdict as LayoutVerdict
from lightning_par.verdict.report import Verdict as Verdict
from lightning_par.verdict.train import Job


def check(
    module: Any,
    batch: Any,
    layouts: Any,
    *,
    devices: int | None = None,
    steps: int = 2,
    gradient_clip_val: float | None = 0.05,
    dropout: bool = False,
    timeout: float = 600.0,
) -> Verdict:
    """Train a LightningModule a few steps on one device and under layouts, in float64 on the CPU, and compare.

    Compared are, from the same initial weights and batches: initial weights (bit by bit), losses, logged values,
    learning rates, gradients before and after clipping, their norm, weights and the optimizer's state. Two values are
    equal where ``|a - b| <= 1e-9 * max(largest |entry| of that tensor, largest |entry| of that quantity)``. The
    module's `training_step` alone is run, in processes of its own; nothing changes in this one. No script is run again.

    Args:
        module: a LightningModule, its class, or a function that makes one. An instance trains from the weights it has.
            On a machine with GPUs let it be of a file that can be imported: it is then trained in fresh processes,
            where one of a script or a notebook is trained in forks of it, which don't work once autograd has run.
        batch: a batch as the step gets it, used for every step; a DataLoader or an iterator gives several, of which
            each step of each copy of the model takes the next one.
        layouts: a list of names (``"tensor_parallel"``), strategies (``PipelineParallelStrategy(microbatches=2)``) and
            dicts of `HybridParallelStrategy`'s arguments (``{"sequence_parallel_size": 2}``).
        devices: processes under each layout; by default what its sizes multiply to, with 2 for an axis without a size.
        steps: optimizer steps.
        gradient_clip_val: the Trainer's, so small that it bites. Left out where the module optimizes by hand.
        dropout: leave dropout on, and let layouts draw what one device draws (``draws="one_device"``), but for
            strategies given as objects, which say themselves. By default it is turned off, and the verdict says so,
            since a layout then draws other masks on shards: layers by their ``p``, else by number attributes with
            "drop" in their names. A probability that is written into the code stays, and makes a difference.
        timeout: seconds for each run.

    Returns:
        The verdict: true if all layouts are equal to one device, and printable as a table. Under a data axis one device
        accumulates over the copies' batches; buffers and what is logged at the end of an epoch are not compared.

    Raises:
        ValueError: an argument is out of range or unknown, or there is no batch.
        TypeError: an argument is of another type than those it may have.
        RuntimeError: the module does not train on one device; or its class is of the running script or notebook, whose
            process can't fork any more, having connected to other ranks.

    Example::

        verdict = lightning_par.check(module, batch, ["tensor_parallel", {"sequence_parallel_size": 2}])
        print(verdict)
        assert verdict
    """
    job = read_job(module, batch, steps, gradient_clip_val, dropout, devices)
    return judge_fresh(job, read_layouts(layouts, devices, job.namespace, draws_of(job)), timeout)


def draws_of(job: Job) -> Draws:
    """What random numbers are under layouts that don't say so."""
    return "one_device" if job.dropout else "per_shard"


def read_job(
    module: Any, batch: Any, steps: int, gradient_clip_val: float | None, dropout: bool, devices: int | None = None
) -> Job:
    """What `check` is to train, from its arguments; raises as it does."""
    for name, value in (("steps", steps), ("devices", devices)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive int, got {value!r}.")
    namespace = _namespace(module)
    if isinstance(module, nn.Module) and any(x.device.type != "cpu" for x in module.parameters()):
        raise ValueError("The module is not on the CPU, where check() runs. Write module.cpu(), or give its class.")
    several = isinstance(batch, DataLoader | Iterator)
    batches = tuple(islice(batch, 64)) if several else (batch,)
    if not batches:
        raise ValueError("There is no batch: the DataLoader or iterator gives none.")
    return Job(module, batches, namespace, steps, gradient_clip_val, dropout)


def _namespace(module: Any) -> Namespace:
    """The Lightning of the module; what makes one is asked for one."""
    made = module
    if not isinstance(module, nn.Module | type):
        if not callable(module):
            raise TypeError(f"module must be a LightningModule, its class or a function, got {module!r}.")
        with generators.kept():
            made = module()
    return namespace_of(made if isinstance(made, type) else type(made))
