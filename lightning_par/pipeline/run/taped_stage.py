"""The calls of one stage, as the tape of a step's dry run has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_par.pipeline.program.program import StepEvent
from lightning_par.pipeline.program.tape import Call, Tape, keys_in
from lightning_par.pipeline.run.local_events import Given, given_to
from lightning_par.pipeline.run.stage_run import StageRun


@dataclass
class TapedStage:
    """The calls of a stage, or why there are none."""

    calls: list[tuple[int, StepEvent, Call]] = field(default_factory=list)
    fits: bool = True
    trains: bool = False  # whether all units do
    draws: bool = False  # whether any unit does, as far as trials have shown
    given: dict[int, Given | None] = field(default_factory=dict)  # to events that are no units


def stage_of(tape: Tape, run: StageRun) -> TapedStage:
    """The calls that make up a stage, if its tape tells them all and units are as they were when it was made."""
    program, stage = run.program, TapedStage()
    known = {key for key, _ in program.routes.coming[run.stage]}
    for index in range(run.first, min(run.end, len(program.events))):
        record, call = program.events[index], tape.calls.get(index)
        if index in tape.unlike:
            return TapedStage(fits=False)
        if call is not None:
            if not known.issuperset(call.keys()) or not call.is_as_it_was():
                return TapedStage(fits=False)
            known.update([(index, n) for n in range(len(record.returned))])
            stage.calls.append((index, record, call))
            if call.original is None:
                stage.given[index] = given_to(record, call, run.memo)
    if run.last and not known.issuperset(keys_in((tape.result, [x.value for x in tape.logs or ()]))):
        return TapedStage(fits=False)
    stage.draws = any(record.draws for _, record, call in stage.calls if call.module is not None)
    stage.trains = all(call.module.training for *_, call in stage.calls if call.module is not None)
    return stage
