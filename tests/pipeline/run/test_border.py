"""What crosses a stage's borders is what the messages of the step say, for every schedule and way of the values."""

from __future__ import annotations

import pytest

from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.run.border import Border, Borders
from lightning_par.pipeline.run.message_plan import Message
from tests.pipeline.run.test_timetable import KINDS, schedules_of, traffic_of


def _actions(schedule: Schedule, *ops: str) -> list[tuple[int, Action]]:
    return [(rank, a) for rank, order in enumerate(schedule.actions) for a in order if a.op in ops]


def _of_others(border: Border, rank: int, at: tuple[int, ...]) -> set[Message]:
    return {message for (source, _, _), message in border.coming if at[source] != rank}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_messages_are_those_of_the_step(kind: str, ranks: int) -> None:
    for schedule in schedules_of(ranks, 4):
        traffic = traffic_of(schedule, kind)
        borders = Borders(traffic)
        for rank, action in _actions(schedule, "F"):
            border = borders.of(action.stage, action.microbatch)
            assert _of_others(border, rank, schedule.placement) == {*traffic.taken_by(rank, action)}
            sent = [message for at, message in traffic.sent_by(rank) if at == action]
            assert sorted(message for _, messages in border.leaving for message in messages) == sorted(sent)
        for rank, action in _actions(schedule, "B", "I"):
            border = borders.of(action.stage, action.microbatch)
            answers = [message for _, messages in border.answered for message in messages]
            assert sorted(answers) == sorted(traffic.taken_by(rank, action))


def test_gradients_come_to_wanted_values_alone() -> None:
    seen = 0
    for schedule in schedules_of(3, 2):
        traffic = traffic_of(schedule, "skips")
        borders = Borders(traffic)
        for _, action in _actions(schedule, "F"):
            border = borders.of(action.stage, action.microbatch)
            wanted, program = traffic.wanted(action.microbatch), traffic.programs[action.microbatch]
            coming = [key for (_, key, _), _ in border.coming]
            assert coming == [key for key, _ in program.routes.coming[action.stage]]
            assert [key for _, key, _ in border.wanted] == [key for key in coming if key in wanted]
            unwanted = [key for key in coming if key not in wanted]
            assert [*border.graphed] == (unwanted if schedule.trains else [])
            assert borders.of(action.stage, action.microbatch) is border
            seen += len(border.graphed)
        assert seen


def test_the_last_stages_rank_is_first() -> None:
    (schedule,) = [s for s in schedules_of(4, 1) if s.name == "1f1b"][:1]
    border = Borders(traffic_of(schedule, "skips")).of(0, 0)
    several = [messages for _, messages in border.answered if len(messages) > 1]
    assert several and all([m.peer for m in ms] == sorted((m.peer for m in ms), reverse=True) for ms in several)
