"""One run of the user's step on tensors without memory, cut into units; units that are alike are looked at once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.blocks import Block, plan_blocks
from lightning_par.planner.notes import Note, StepNotes
from lightning_par.private.pytree import tree_map
from lightning_par.trial.recording import Event, Recording
from lightning_par.trial.trial_run import record_step


@dataclass(frozen=True)
class Run:
    """Functions that run one after the other in one unit.

    Attributes:
        path: of the module that a container repeats; "" for what lies between these.
        first: the number of the first event.
        end: the number of the one behind the last.
        kind: which number of run is the first that is like it.
    """

    path: str
    first: int
    end: int
    kind: int


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A recorded step in runs.

    Attributes:
        recording: the step.
        notes: the note of each event.
        runs: the events in order, in runs.
        names: of the parameters, by the ids of their fakes.
        blocks: whose weights are gathered together, if stored in parts.
        samples: in the recorded batch.
    """

    recording: Recording
    notes: tuple[Note | None, ...]
    runs: tuple[Run, ...]
    blocks: tuple[Block, ...]
    samples: int

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return self.recording.events

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        return {id(x): names for names, x in self.recording.parameters.items()}

    @cached_property
    def of_batch(self) -> frozenset[int]:
        """Ids of the tensors that depend on the batch."""
        found = {id(x) for x in self.recording.batch}
        for event in self.events:
            if any(id(x) in found for x in event.inputs):
                found.update(id(x) for x in event.outputs)
        return frozenset(found)

    @cached_property
    def folded(self) -> Recording:
        """The recording with one run of each kind; what comes after a run left out takes the values of its like."""
        return _fold(self)


def record(module: nn.Module, batch: Any, context: Any = None) -> RecordedStep:
    """Run the training step of ``module`` once, without memory for its weights or activations.

    Args:
        module: as `build_module` makes it.
        batch: one batch.
        context: entered around the step, for precision.

    Raises:
        ValueError: fakes can't run the step; the message says which line.
    """
    made: list[StepNotes] = []

    def listener() -> StepNotes:
        made.append(StepNotes())
        return made[-1]

    def around() -> Any:
        stack = contextlib.ExitStack()
        if context is not None:
            stack.enter_context(context())
        if made:
            stack.enter_context(made[-1].open())
        return stack

    recording = record_step(
        module, "training_step", batch, context=around, listeners=listener, grad=True, device=torch.device("cpu")
    )
    if recording.stopped is not None:
        raise ValueError(f"The step can't be run without values: {recording.stopped}.")
    notes = _notes(recording)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    blocks = plan_blocks(module, sizes)
    samples = next((x.shape[0] for x in recording.batch if x.ndim), 1)
    return RecordedStep(recording, notes, _runs(recording, notes, blocks), blocks, samples)


def _notes(recording: Recording) -> tuple[Note | None, ...]:
    heard: StepNotes | None = recording.heard
    left = {key: list(notes) for key, notes in heard.notes.items()} if heard is not None else {}
    found: list[Note | None] = []
    for event in recording.events:
        mine = [left[id(x)].pop(0) for x in event.outputs if left.get(id(x))]
        kept = tuple(k for note in mine for k in note.kept)
        found.append(Note(mine[0].path, kept) if mine else None)
    return tuple(found)


def _runs(recording: Recording, notes: tuple[Note | None, ...], blocks: tuple[Block, ...]) -> tuple[Run, ...]:
    repeated = {path for block in blocks if block.repeated for path in block.paths}
    homes: dict[str, str] = {}

    def home(path: str) -> str:
        if path not in homes:
            parts = path.split(".")
            above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            homes[path] = next((name for name in above if name in repeated), "")
        return homes[path]

    places: list[str | None] = [None if note is None else home(note.path) for note in notes]
    for i, place in enumerate(places):  # what has no note goes with what follows
        if place is None:
            places[i] = next((p for p in places[i + 1 :] if p is not None), places[i - 1] if i else "")
    runs: list[tuple[str, int, int]] = []
    for i, place in enumerate(places):
        assert place is not None
        if runs and runs[-1][0] == place:
            runs[-1] = (place, runs[-1][1], i + 1)
        else:
            runs.append((place, i, i + 1))
    return _told_apart(recording, notes, runs)


def _told_apart(recording: Recording, notes: tuple[Note | None, ...], runs: list[tuple[str, int, int]]) -> Any:
    kinds: dict[Any, int] = {}
    found = []
    for number, (path, first, end) in enumerate(runs):
        outline = tuple(
            (event.name, _outline(event), _relative(notes[i], path))
            for i, event in enumerate(recording.events[first:end], first)
        )
        key = (bool(path), outline) if path else number
        found.append(Run(path, first, end, kinds.setdefault(key, number)))
    return tuple(found)


def _relative(note: Note | None, path: str) -> Any:
    return None if note is None else (note.path.removeprefix(path), tuple((k.shape, k.itemsize) for k in note.kept))


def _outline(event: Event) -> Any:
    def told(x: Any) -> Any:
        return (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else str(x)

    return str(tree_map(told, (event.args, event.kwargs, event.result)))


def _fold(step: RecordedStep) -> Recording:
    stands: dict[int, Tensor] = {}
    kept: list[Event] = []

    def stand(x: Any) -> Any:
        return stands.get(id(x), x) if isinstance(x, Tensor) else x

    for number, run in enumerate(step.runs):
        if run.kind == number:
            for event in step.events[run.first : run.end]:
                args, kwargs, result = tree_map(stand, (event.args, event.kwargs, event.result))
                kept.append(replace(event, args=args, kwargs=kwargs, result=result))
            continue
        like = step.runs[run.kind]
        for a, b in zip(step.events[like.first : like.end], step.events[run.first : run.end], strict=True):
            weights = [(x, y) for x, y in zip(a.inputs, b.inputs) if id(y) in step.names]
            stands.update({id(y): stand(x) for x, y in (*zip(a.outputs, b.outputs), *weights) if x is not y})
    left = {names: x for names, x in step.recording.parameters.items() if id(x) not in stands}
    return replace(step.recording, events=tuple(kept), parameters=left, heard=None)
