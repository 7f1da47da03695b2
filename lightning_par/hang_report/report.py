"""The report of a run that stands still, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from lightning_par.hang_report.culprit import Finding
from lightning_par.hang_report.rank_state import RankState, named

_MOST = 40  # groups of ranks that are shown
_SHOWN = 4  # stacks


@dataclass(frozen=True)
class Report:
    """What is told of a run that stands still.

    Attributes:
        states: of all ranks, in order.
        finding: who holds it up.
        after: seconds that a rank has waited.
        timeout: seconds after which the process group gives up, where they are known.
        address: of a rank that answers; "host:port".
        when: it was made.
        file: where it is written to; empty where it can't be.

    Example::

        print(Report(states, find(states), 300.0, 1800.0, "host0:40123", datetime.now(timezone.utc)))
    """

    states: tuple[RankState, ...]
    finding: Finding
    after: float
    timeout: float | None
    address: str
    when: datetime
    file: str = ""

    @property
    def conclusion(self) -> str:
        """One line: who is the likely culprit."""
        return conclusion(self.finding, {state.rank: state for state in self.states})

    @property
    def shown(self) -> tuple[int, ...]:
        """The ranks whose stacks are shown."""
        finding = self.finding
        others = [rank for rank in finding.circle if rank not in finding.culprits]
        return (*finding.culprits, *others)[:_SHOWN]

    def with_stacks(self, told: Mapping[int, RankState]) -> Report:
        """The report with the stacks that ranks have told since."""
        stacks = {rank: state.stack for rank, state in told.items()}
        return replace(self, states=tuple(replace(s, stack=stacks.get(s.rank, s.stack)) for s in self.states))

    def __str__(self) -> str:
        known = {state.rank: state for state in self.states}
        lines = [
            f"=== Hang report of {len(self.states)} ranks, {self.when.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC: "
            f"a rank has waited for {self.after:.3g} s ===",
            *groups(self.states, self.finding.waits),
            self.conclusion,
        ]
        for rank in self.shown:
            lines += [f"Python stack of rank {rank}:", _stack_of(known[rank])]
        lines += self._more()
        return "\n".join(lines) + "\n"

    def _more(self) -> list[str]:
        end = f" The process group gives up after {self.timeout:g} s (`timeout`)." if self.timeout else ""
        lines = [
            "This report is no error: the run goes on if the wait ends, as where one rank is long about a checkpoint."
            + end,
            f"Stacks of all ranks, at any time: python -m lightning_par stacks {self.address}",
        ]
        return [*lines, f"This report is also in {self.file}"] if self.file else lines


def conclusion(finding: Finding, known: Mapping[int, RankState]) -> str:
    """One line: who is the likely culprit."""
    culprits = [known[rank] for rank in finding.culprits]
    if finding.kind == "together":
        return (
            f"No likely culprit: all {len(culprits)} ranks have come to {culprits[0].place or 'one place'}, but what "
            "they send each other does not arrive. A connection between them may be down."
        )
    if finding.kind == "branches":
        return _branches(finding, known)
    whats = [f"{who}, {_what(state)}" for who, state in _alike(culprits)]
    return f"Likely culprit: {'; '.join(whats[:_SHOWN])}{_and_more(len(whats))}"


def _branches(finding: Finding, known: Mapping[int, RankState]) -> str:
    sides = [f"{who}: {_waiting(state)}" for who, state in _alike([known[rank] for rank in finding.circle])]
    text = f"{'; '.join(sides[:_SHOWN])}{_and_more(len(sides))}"
    if set(finding.culprits) != set(finding.circle):
        who = named(finding.culprits)
        return f"Likely culprit: {who}, in another branch of the code than the ranks that wait for it: {text}"
    return f"Likely culprits: {named(finding.culprits)} wait for one another, in different branches of the code: {text}"


def _alike(states: Iterable[RankState]) -> list[tuple[str, RankState]]:
    """Ranks of which the same is told, with one of them."""
    found: dict[tuple[object, ...], list[RankState]] = {}
    for state in states:
        found.setdefault((state.answer, state.process, state.doing, state.place, _last(state)), []).append(state)
    return [(named([one.rank for one in group]), group[0]) for group in found.values()]


def _and_more(count: int) -> str:
    return f"; and {count - _SHOWN} more" if count > _SHOWN else ""


def _what(state: RankState) -> str:
    """Of one that waits for nobody."""
    who = f"pid {state.pid} on {state.host}"
    if state.answer == "ended":
        return f"whose process ({who}) has ended"
    if state.answer == "silent":
        said = f": its process is {state.process}" if state.process else ""
        return f"which does not answer ({who}){said}"
    if state.answer == "left":
        return f"which has left the run ({who}): {state.process}"
    at = f" at {state.place}" if state.place else ""
    if state.waits:
        return f"which {state.doing}{at} ({who}), to which no other rank has come"
    return f"which {state.doing}{at} ({who}), for {state.still:.0f} s"


def _waiting(state: RankState) -> str:
    last = _last(state)
    return f"{state.doing} at {state.place or 'an unknown line'}" + (f" ({last})" if last else "")


def _last(state: RankState) -> str:
    return "" if state.last is None else str(state.last)


def groups(states: Sequence[RankState], waits: Mapping[int, frozenset[int]]) -> list[str]:
    """A paragraph for each group of ranks of which the same is told.

    Args:
        states: of the ranks.
        waits: for whom each of them waits.
    """
    found: dict[tuple[str, ...], list[RankState]] = {}
    for state in states:
        found.setdefault(tuple(_told(state, waits.get(state.rank, frozenset()))), []).append(state)
    lines = []
    for told, group in [*found.items()][:_MOST]:
        still = [state.still for state in group]
        since = f"{min(still):.0f}" + (f" to {max(still):.0f}" if round(max(still)) > round(min(still)) else "")
        first = f"{named([state.rank for state in group])}:".capitalize()
        lines += [f"{first} {told[0]}" + (f", for {since} s" if group[0].answer == "answers" else "")]
        lines += [f"    {line}" for line in told[1:]]
    if len(found) > _MOST:
        lines.append(f"... and {len(found) - _MOST} more groups of ranks")
    return lines


def _told(state: RankState, waits: Iterable[int]) -> list[str]:
    if state.answer != "answers":
        return [_what(state)]
    where = ", ".join(text for text in (state.phase, f"runs {state.event}" if state.event else "") if text)
    lines = [state.doing + (f" for {named([*waits])}" if waits else "")]
    lines += [f"at {state.place}"] if state.place else []
    lines += [f"last begun: {_last(state)}"] if state.last is not None else []
    return [*lines, f"in {where}"] if where else lines


def _stack_of(state: RankState) -> str:
    if state.stack:
        return state.stack.rstrip("\n")
    return "  It can't be had: " + {"ended": "the process has ended", "left": "the rank has left the run"}.get(
        state.answer, "the rank does not answer"
    )
