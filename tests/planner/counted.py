"""Real runs, counted, against what the planner says of them: ``python -m tests.planner.counted``.

Of each rank: bytes of parameters, gradients and the optimizer's state, and bytes that it sends in a step by axis,
without what is no matter of a layout (`dried.APART`).
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_par import HybridParallelStrategy
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.ledger import ledger
from lightning_par.pipeline.between_steps.gradients.own_gradient import held_here
from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.messages.clipped import read_clip
from lightning_par.planner.messages.dried import AXES, by_axis
from lightning_par.planner.planner import Planner
from lightning_par.sharded.tensor import leaf
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool

CASES = ("gpt", "gqa_repeat", "gpt_tied", "gpt_5_heads", "mlp_deep", "unet", "lstm", "encoder_decoder", "hf_llama",
         "hf_bert", "gpt_checkpointed", "gpt_parallel")  # fmt: skip

_PP = dict(pipeline_parallel_size=2, microbatches=2)
_TP, _SP, _DP = dict(tensor_parallel_size=2), dict(sequence_parallel_size=2), dict(data_parallel_size=2)
_FSDP = dict(data_parallel_size=2, data_parallel="fsdp")
TWO: dict[str, dict[str, Any]] = {
    "data": _DP,
    "fsdp": _FSDP,
    "fsdp_kept": _FSDP | dict(reshard_after_forward=False),
    "tensor": _TP,
    "shard_residual": _TP | dict(shard_residual=True),
    "ring": _SP | dict(attention="ring"),
    "ulysses": _SP | dict(attention="ulysses"),
    "all_gather": _SP | dict(attention="all_gather"),
    "gpipe": _PP | dict(schedule="gpipe"),
    "1f1b": _PP | dict(schedule="1f1b"),
    "interleaved": _PP | dict(schedule="interleaved_1f1b"),
    "zbv": _PP | dict(schedule="zbv"),
}
FOUR: dict[str, dict[str, Any]] = {
    "tensor_4": dict(tensor_parallel_size=4),
    "fsdp_4": _FSDP | dict(data_parallel_size=4),
    "pipeline_4": _PP | dict(pipeline_parallel_size=4, microbatches=4),
    "ring_4": _SP | dict(sequence_parallel_size=4, attention="ring"),
    "data_tensor": _DP | _TP,
    "fsdp_tensor": _FSDP | _TP,
    "pipeline_ulysses": _PP | _SP | dict(schedule="1f1b", attention="ulysses"),
    "fsdp_ring": _FSDP | _SP | dict(attention="ring"),
    "data_pipeline": _DP | _PP,
    "fsdp_pipeline": _FSDP | _PP,
    "pipeline_tensor": _PP | _TP,
    "pipeline_ring": _PP | _SP | dict(attention="ring"),
    "tensor_ring": _TP | _SP | dict(attention="ring"),
}
LAYOUTS = TWO | FOUR
MORE: dict[str, dict[str, Any]] = {
    "fsdp_pipeline_let_go": _FSDP | _PP | dict(reshard_after_forward=True),
    "zbv_tensor": _PP | _TP | dict(schedule="zbv"),
}
"""Whose bytes alone are compared: what they make live is reckoned by a formula."""


@dataclass
class Counted:
    """Of one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    sent: dict[str, float] = field(default_factory=dict)
    by_purpose: dict[tuple[str, str], float] = field(default_factory=dict)


class _Count(Callback):
    """In the second step, from its batch's start to the start of the next, or the end of the epoch."""

    def __init__(self) -> None:
        self.found = Counted()
        self.moved: Any = None

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.on_train_epoch_end(trainer, module)
        if batch_idx == 1:
            self.context = ledger()
            self.moved = self.context.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        held = _held(module)
        self.found.parameters = sum(_bytes(x) for x in held)
        # without asking other stages, which hold other weights, or all of theirs in parts
        self.found.gradients = sum(_bytes(g) for x in held if (g := held_here(leaf(x))) is not None)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        states = [x for one in trainer.optimizers for state in _own_state(one).values() for x in state.values()]
        self.found.optimizer = sum(_bytes(x) for x in states if isinstance(x, Tensor) and not is_elsewhere(x))

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        moved, self.moved = self.moved, None
        if moved is not None:
            self.context.__exit__(None, None, None)
            found: dict[tuple[str, str], float] = defaultdict(float)
            for transfer in moved.transfers:
                found[transfer.axis, transfer.purpose] += transfer.sent
            self.found.by_purpose, self.found.sent = dict(found), by_axis(found)


def _own_state(optimizer: Any) -> Any:
    """Without asking other stages, which would ask back."""
    return getattr(optimizer.state, "own", optimizer.state)


def _held(module: Any) -> list[Tensor]:
    return [x for x in module.parameters() if not is_elsewhere(x)]


def _bytes(x: Tensor) -> int:
    held = leaf(x)
    return held.numel() * held.element_size()


def run(case: str, layout: dict[str, Any], precision: Any = "32-true", clip: float | None = None) -> Counted:
    """Train ``case`` on this rank; what the second step had."""
    torch.manual_seed(0)
    model = MODELS[case]
    loader = DataLoader(model.data(0), batch_size=model.batch_size)  # type: ignore[arg-type]
    return trained(model.module(), loader, layout, precision, clip)


def trained(
    module: Any, loader: Any, layout: dict[str, Any], precision: Any = "32-true", clip: float | None = None
) -> Counted:
    """Train ``module`` on this rank; what the second step had, with what follows it."""
    count, ranks = _Count(), ranks_of(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=ranks, strategy=HybridParallelStrategy(**layout), limit_train_batches=3,
            max_epochs=1, callbacks=[count], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, precision=precision, gradient_clip_val=clip,
        )  # fmt: skip
        trainer.fit(module, loader)
    return count.found


def ranks_of(layout: dict[str, Any]) -> int:
    """How many ranks a layout has."""
    return prod(size for name, size in layout.items() if name.endswith("_size"))


@lru_cache
def planner(case: str, precision: str = "32-true", clip: float | None = None) -> Planner:
    """Of ``case``, on CPUs as the runs, else on a machine that does not matter here."""
    machine = replace(read_machine("8xH100")[0], gpu=False)
    return Planner(MODELS[case].module, batch_of(case), machine, precision, clip=read_clip(clip))


def batch_of(case: str) -> Any:
    """Its first."""
    model = MODELS[case]
    return default_collate(model.data(0)[: model.batch_size])


def planned(case: str, layout: dict[str, Any], precision: str = "32-true", clip: float | None = None) -> list[Counted]:
    """What the planner says of each rank."""
    from lightning_par.planner.report import layout_dict

    ranks = ranks_of(layout)
    found = layout_dict(planner(case, precision, clip).evaluate(layout, ranks))
    return [Counted(rank["parameters"], rank["gradients"], rank["optimizer"], rank["sent"]) for rank in found["ranks"]]


def differences(counted: list[Counted], said: list[Counted]) -> list[str]:
    """In words, each rank by itself."""
    found = []
    for rank, (real, plan) in enumerate(zip(counted, said, strict=True)):
        for name in ("parameters", "gradients", "optimizer"):
            if getattr(real, name) != getattr(plan, name):
                found.append(f"rank {rank}: {name}: {getattr(plan, name):,} predicted, {getattr(real, name):,} counted")
        for axis, size in real.sent.items():
            if size != plan.sent.get(axis, 0):
                purposes = {p: s for (a, p), s in real.by_purpose.items() if AXES.get(a) == axis}
                found.append(f"rank {rank}: sent along {axis}: {plan.sent.get(axis, 0):,} predicted, {size:,} counted"
                             f", {purposes}")  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--layout", action="append", choices=LAYOUTS | MORE)
    parser.add_argument("--purposes", action="store_true")
    asked = parser.parse_args()
    pool, good, total = Pool(), 0, 0
    for case in asked.model or CASES:
        for name in asked.layout or LAYOUTS | MORE:
            layout = (LAYOUTS | MORE)[name]
            ranks = ranks_of(layout)
            try:
                counted = pool.run(ranks, run, case, layout)
            except RuntimeError as error:
                print(f"{case} {name}: not run: {str(error).strip().splitlines()[-1][:160]}", flush=True)
                continue
            total += 1
            try:
                lines = differences(counted, planned(case, layout))
            except ValueError as error:
                lines = [f"refused by the planner: {error}"]
            good += not lines
            print(f"{case} {name}: {'exact' if not lines else ''}", *lines, sep="\n    ", flush=True)
            if asked.purposes:
                print("   ", counted[0].by_purpose, flush=True)
    pool.close()
    print(f"{good} of {total} exact")


if __name__ == "__main__":
    from tests.planner.counted import main as run_main  # so that ranks know its functions by a module's name

    run_main()
