"""Look before you launch: which layouts fit a module on a machine, and how fast each would be.

    recording/: the module is built without memory, its step runs once on fakes, and what its units compute is profiled
    replay/:    its functions run again by the rules of sharded tensors, as one rank of a layout runs them
    machine/:   what devices and links do, of data sheets or of the machine at hand
    times/, memory/, messages/: seconds, bytes of live tensors and bytes sent, of a layout
    layouts/:   which there are, and the search for those that are worth a look

`planner` holds a module recorded once, `predict` prices one layout of it, `advice` says what helps where none fits,
`report` shows it, `command` is the command line, `at_launch` plans a run that has begun.

How far predictions are from published runs: ``python -m tests.planner.published``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_par.planner.report import Plan


def plan(
    module: Any,
    batch: Any,
    machine: str,
    *,
    devices: int | None = None,
    layout: Mapping[str, Any] | None = None,
    precision: str | int = "32-true",
    global_batch: int | None = None,
    recompute: str = "none",
    eager: bool = False,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> Plan:
    """Which layouts of a module fit on a machine, and how fast they are predicted to be. Nothing is computed.

    Args:
        module: a LightningModule, its class, or a function that makes one; built without memory for its weights.
        batch: one batch as a replica's loader gives it, before `on_before_batch_transfer` and the like; a DataLoader, a
            LightningDataModule, or a function that makes one.
        machine: a preset such as ``"H100"``, with the devices of a host ``"8xH100"``, the path of a YAML, or
            ``"measure"``: a probe of this machine, in processes of its own.
        devices: over all hosts; by default one host's.
        layout: `HybridParallelStrategy`'s arguments: evaluates that layout alone.
        precision: as the Trainer's.
        global_batch: samples of one step of the optimizer over all replicas. By default a batch for each replica of
            ``layout``; without one, a batch for each device, whatever the layout, so that results are the same.
        recompute: what backward computes again: ``"none"``, ``"selective"`` (attention that is written out; else all
            but fused attention and every other product), ``"full"`` (each layer).
        eager: whether functions that walk over memory run one by one, as without ``torch.compile``.
        accumulate_grad_batches: as the Trainer's: what ``global_batch`` is by default is so many times as much.
        gradient_clip_val: as the Trainer's.
        gradient_clip_algorithm: as the Trainer's.

    Returns:
        The layouts, priced, and which one to take; printable as a table.

    Raises:
        ValueError: the machine, the precision or the layout is unknown or can't be; the module can't be built, or its
            step can't be run without values. The message says what to write instead.

    Example::

        plan = lightning_par.plan(MyModule, batch, "8xH100", devices=1024, precision="bf16-mixed")
        print(plan)
    """
    from lightning_par.planner.make_plan import make_plan
    from lightning_par.planner.messages.clipped import read_clip

    return make_plan(
        module, batch, machine, devices, layout, precision, global_batch, recompute, eager, accumulate_grad_batches,
        read_clip(gradient_clip_val, gradient_clip_algorithm),
    )  # fmt: skip
