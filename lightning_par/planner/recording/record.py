"""The user's step, run once on tensors without memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.blocks import plan_blocks
from lightning_par.fsdp.kept_whole import kept_whole
from lightning_par.planner.recording.checkpointed import regions_heard
from lightning_par.planner.recording.notes import Heard, Note, StepNotes
from lightning_par.planner.recording.recorded import RecordedStep, casting
from lightning_par.planner.recording.unit_runs import told_apart
from lightning_par.planner.recording.users_hooks import hooked
from lightning_par.planner.replay.gpu_kernels import kernels
from lightning_par.private.pytree import tree_leaves
from lightning_par.trial.recording import Recording
from lightning_par.trial.trial_run import record_step


def record(
    module: nn.Module, batch: Any, autocast: torch.dtype | None = None, fused: bool = True, gpu: bool = True
) -> RecordedStep:
    """Run the training step of ``module`` once, without memory for its weights or activations.

    Args:
        module: as `build_module` makes it.
        batch: one batch.
        autocast: the dtype in which torch's autocast runs products; None: it runs none.
        fused: whether for a machine that fuses functions. For one that does not it is found out how long variables hold
            what the step makes, for counts of live tensors.
        gpu: whether kernels are a GPU's.

    Raises:
        ValueError: fakes can't run the step; the message says which line.
    """
    made: list[StepNotes] = []
    samples = next((x.shape[0] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim), 1)

    def listener() -> StepNotes:
        made.append(StepNotes(samples, not fused))
        return made[-1]

    def around() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(casting(autocast))
        if made:
            stack.enter_context(made[-1].keeps())
            stack.enter_context(regions_heard(made[-1]))
        return stack

    with kernels(gpu):
        recording = record_step(
            module, "training_step", batch, context=around, listeners=listener, device=torch.device("cpu"),
            hears_started=True, planned=True,
        )  # fmt: skip
    if recording.stopped is not None:
        raise ValueError(f"The step can't be run on this batch without values: {recording.stopped}.")
    heard: Heard = recording.heard
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    blocks = plan_blocks(module, sizes)
    notes = _notes(recording, heard)
    hooks = Counter(hooked(module)) + Counter(heard.hooked)
    whole = frozenset(kept_whole(module, ()))
    step = RecordedStep(recording, notes, heard.calls, heard.survey, (), blocks, samples, autocast, hooks, whole)
    begins = [i for i, home in enumerate(step.homes) if not i or home != step.homes[i - 1]]
    return replace(step, runs=told_apart(step, list(zip(begins, [*begins[1:], len(step.events)]))))


def _notes(recording: Recording, heard: Heard) -> tuple[Note | None, ...]:
    left = {key: list(notes) for key, notes in heard.notes.items()}
    found: list[Note | None] = []
    for event in recording.events:
        mine = [left[id(x)].pop(0) for x in event.outputs if left.get(id(x))]
        kept = tuple(k for note in mine for k in note.kept)
        off = frozenset(key for note in mine for key in note.off)
        found.append(Note(mine[0].call, kept, off, mine[0].region) if mine else None)
    return tuple(found)
