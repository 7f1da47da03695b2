"""What the user's ``stages`` say: a stage for each name or pattern, or the first modules of the later stages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from lightning_par.pipeline.plan.balance_time import UnitCall
from lightning_par.pipeline.plan.units import ModuleCall, ancestors, choose_units, list_names, unit_calls, walk

Wishes = Mapping[str, int] | Sequence[str]
Placed = tuple[list[UnitCall], list[int]]

_FORMS = 'Write e.g. stages={"blocks.[0-3]": 0, "blocks.[4-7]": 1}, or the first modules of the later stages: '
_FORMS += 'stages=["blocks.4"].'


@dataclass(frozen=True)
class Asker:
    """Who needs how many stages of which module, in the user's words."""

    name: str
    module: str
    stages: int

    @property
    def range(self) -> str:
        return "only stage 0" if self.stages == 1 else f"the stages 0 to {self.stages - 1}"


def check_wishes(wishes: object) -> None:
    """Raises TypeError or ValueError where ``wishes`` are no stages of modules, whatever the modules are."""
    if wishes is None:
        return
    if isinstance(wishes, Mapping):
        if not wishes:
            raise ValueError("stages={} names no module. Leave it out to have the stages balanced.")
        for pattern, index in wishes.items():
            _check_name(f"stages[{pattern!r}]", pattern)
            if not isinstance(index, int) or isinstance(index, bool):
                raise TypeError(f"stages[{pattern!r}] must be the index of a stage, an int, not {index!r}.")
            if index < 0:
                raise ValueError(f"stages[{pattern!r}] = {index} is negative: stages count from 0, the first one.")
    elif isinstance(wishes, Sequence) and not isinstance(wishes, str | bytes):
        for number, name in enumerate(wishes):
            _check_name(f"stages[{number}]", name)
        if twice := [name for name in wishes if list(wishes).count(name) > 1]:
            raise ValueError(f"stages names {twice[0]!r} twice: each name begins another stage.")
    else:
        raise TypeError(
            f"stages must be a dict of module names or patterns to stages, or a list of module names, got "
            f"{type(wishes).__name__}. {_FORMS}"
        )


def _check_name(where: str, name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{where}: a module name must be a str, not {type(name).__name__}. {_FORMS}")


def glob_stages(root: ModuleCall, wishes: Mapping[str, int], who: Asker, opened: Collection[str] = ()) -> Placed:
    """The calls, each in the stage of the pattern that matches its module or one around it.

    Raises:
        ValueError: a pattern or a stage that does not fit, a module with no stage or with two, values sent backwards.
    """
    modules = _called(root)
    required: list[str] = []
    for pattern, index in wishes.items():
        if index >= who.stages:
            raise ValueError(
                f"stages[{pattern!r}] = {index}, but {who.name} has {who.range}. Write one of these, or use more "
                "devices."
            )
        required += [path for path in _topmost(pattern, modules, who) if modules[path]]
    calls = unit_calls(root, choose_units(root, who.stages, required, opened))
    patterns = {call.path: _pattern_of(call.path, wishes) for call in calls}
    places = [wishes[patterns[call.path]] for call in calls]
    for missing in sorted({*range(who.stages)} - {*places}):
        named = next((pattern for pattern, index in wishes.items() if index == missing), None)
        why = f"{named!r} has no parameters" if named else "no module is given to it"
        raise ValueError(
            f"{who.name} has {who.range}, but stage {missing} would be empty: {why}. Give each stage a module with "
            "parameters, or use fewer devices."
        )
    _check_order(calls, places, patterns)
    return calls, places


def _pattern_of(unit: str, wishes: Mapping[str, int]) -> str:
    found = [pattern for pattern in wishes if _matches(unit, pattern)]
    if not found:
        near = ", ".join(f"{pattern!r}: {index}" for pattern, index in list(wishes.items())[:3])
        raise ValueError(
            f"stages gives {unit!r} no stage: it names {near}{', ...' if len(wishes) > 3 else ''}. Add {unit!r} or a "
            "pattern that matches it."
        )
    for other in found[1:]:
        if wishes[other] != wishes[found[0]]:
            raise ValueError(
                f"stages gives {unit!r} to two stages: stages[{found[0]!r}] = {wishes[found[0]]} and "
                f"stages[{other!r}] = {wishes[other]}. Write narrower patterns, so that one of them matches it."
            )
    return found[0]


def _check_order(calls: Sequence[UnitCall], places: Sequence[int], patterns: Mapping[str, str]) -> None:
    front = 0
    for i, (call, place) in enumerate(zip(calls, places)):
        if place >= places[front]:
            front = i
            continue
        early, late = patterns[calls[front].path], patterns[call.path]
        message = (
            f"stages puts {calls[front].path!r} on stage {places[front]} and {call.path!r} on stage {place}, but the "
            f"step calls {call.path!r} after {calls[front].path!r}, and values go forward through the stages only. "
        )
        if any(one.path == call.path for one in calls[:front]):
            cuts = [calls[places.index(stage)].path for stage in range(1, max(places) + 1)]
            raise ValueError(
                f"{message}{call.path!r} is called several times. Where a module shall be on several stages, write the "
                f"first modules of the later stages: stages={cuts}."
            )
        raise ValueError(
            f"{message}Write stages[{late!r}] = {places[front]} or more, or stages[{early!r}] = {place} or less."
        )


def cut_stages(root: ModuleCall, cuts: Sequence[str], who: Asker, opened: Collection[str] = ()) -> Placed:
    """The calls, with a new stage from the first call of each of ``cuts`` on.

    Raises:
        ValueError: too few or too many names, an unknown one, or names that are not in execution order.
    """
    if len(cuts) != who.stages - 1:
        raise ValueError(
            f"stages={list(cuts)} begins {len(cuts) + 1} stages, but {who.name} needs {who.stages}: name the first "
            f"module of each stage but stage 0, {who.stages - 1} in all."
        )
    modules = _called(root)
    tops = {cut: _topmost(cut, modules, who) for cut in cuts}
    for cut, paths in tops.items():
        if not any(modules[path] for path in paths):
            after = [path for path in list(modules)[list(modules).index(paths[0]) :] if modules[path]]
            hint = f", e.g. {after[0]!r}" if after else ""
            raise ValueError(f"stages names {cut!r}, which has no parameters. Name a module that has some{hint}.")
    required = [path for paths in tops.values() for path in paths if modules[path]]
    calls = unit_calls(root, choose_units(root, who.stages, required, opened))
    starts = [0, *(_first(calls, cut, opened) for cut in cuts)]
    for before, cut, start, here in zip([None, *cuts], cuts, starts, starts[1:]):
        if here <= start:
            _refuse_cut(cut, before, calls[here].path)
    return calls, [sum(start <= i for start in starts) - 1 for i in range(len(calls))]


def _first(calls: Sequence[UnitCall], cut: str, opened: Collection[str]) -> int:
    """Which of the ``calls`` is the first that ``cut`` matches.

    Raises:
        ValueError: none is, as where all that has parameters in it lies in what is ``opened``.
    """
    found = next((i for i, call in enumerate(calls) if _matches(call.path, cut)), None)
    if found is None:
        raise ValueError(
            f"stages names {cut!r}, of which nothing could begin a stage once {list_names(opened)} is taken apart. "
            "Name a module behind it."
        )
    return found


def _refuse_cut(cut: str, before: str | None, unit: str) -> NoReturn:
    if before is None:
        raise ValueError(
            f"stages begins stage 1 with {cut!r}, but the step calls {unit!r} first of all: stage 0 would be empty. "
            "Name the first modules of the stages 1, 2, ... only."
        )
    raise ValueError(
        f"stages names {cut!r} after {before!r}, but the step does not call {unit!r} after it. Write the names in the "
        "order in which the step calls the modules."
    )


def _called(root: ModuleCall) -> dict[str, int]:
    """The modules that the step calls, in its order, with the number of their parameters."""
    return {call.path: call.numel for call in walk(root) if call.path}


def _matches(path: str, pattern: str) -> bool:
    return any(fnmatchcase(one, pattern) for one in (path, *ancestors(path)))


def _topmost(pattern: str, modules: Iterable[str], who: Asker) -> list[str]:
    """The called modules that ``pattern`` matches and that lie in no other one of these."""
    hits = {path for path in modules if _matches(path, pattern)}
    if not hits:
        near = difflib.get_close_matches(pattern, list(modules), n=3, cutoff=0.4)
        hint = f" Did you mean {', '.join(map(repr, near))}?" if near else f" It calls {list_names(modules)}."
        raise ValueError(
            f"stages names {pattern!r}, which matches no module that the step of {who.module} calls.{hint}"
        )
    return [path for path in modules if path in hits and not hits.intersection(ancestors(path))]
