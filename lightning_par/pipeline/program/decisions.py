"""What a step decides by numbers of the whole batch, which is cut into microbatches, none of which has them.

A guard, as ``if torch.isnan(loss): raise`` or ``return None``, leads to the same program, to an exception or to no
loss, so that microbatches can go by the other answer. What lies behind the last unit runs once more on the whole batch,
where the guard sees the true value and raises, or skips the step, as on one device. Where the batch is whole, a guard
that raises between units sees the true value on the stage that has it; the others go by the answer that doesn't raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import isnan
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.make_program import wanted_of
from lightning_par.pipeline.program.program import Key, Program
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.analysis import Analysis
from lightning_par.python_state.nested_tensors import returned_tensors
from lightning_par.sharded.tensor import full
from lightning_par.trial.guesses import TRIES, EndlessError, Guesses
from lightning_par.trial.guesses import Key as Question
from lightning_par.trial.step import loss_in

_ENDS = (Exception, SystemExit, EndlessError)  # of a run by other guesses: ``sys.exit()`` is a way to end, too
Outline = tuple[Any, ...]
Again = Callable[[Guesses], tuple[Analysis, Any]]


def follow_decisions(run: Analysis, again: Again, whole: Again, program: Program) -> frozenset[int]:
    """See that whatever the step decides, it does the same, raises or returns no loss.

    Before its last unit, where only microbatches are, what decides must be a check that raises, and of which each
    microbatch's answer does for the whole batch's: that all of the samples are as they should be.

    Args:
        run: the recorded run.
        again: runs the step by other guesses.
        whole: as ``again``, where samples may mix: a branch that ends in an exception may look at all of them.
        program: that was made of ``run``.

    Returns:
        The events before the last unit that check so.

    Raises:
        SamplesMixError: a decision leads elsewhere, or is another one before the last unit, or a number is read there.
    """
    early = frozenset(index for index, event in enumerate(run.events[: run.tail]) if event.kind == "read")
    for index in sorted(early - run.asks.keys()):  # behind the last unit alone the whole batch's number is there
        raise SamplesMixError(f"the step reads a value of the whole batch at {run.events[index].place}")
    if not run.guesses.decided:
        return frozenset()
    blind = program.plain_effects or not (early <= run.sure and early == guards_between_units(run, whole))
    waiting: list[tuple[Guesses, frozenset[Question]]] = [(run.guesses, frozenset())]
    outline, seen = _outline(run), 1

    def guards(other: Guesses, place: Question) -> bool:
        return _raises(whole, other, place) or (run.training and _skips(again, other, outline))

    while waiting:
        guesses, flipped = waiting.pop()
        for place in guesses.decided:
            if place in flipped:
                continue
            seen += 1
            other = Guesses(guesses.with_other(place))
            if blind or seen > TRIES or not (_leads_to(again, other, outline) or guards(other, place)):
                file, line, _ = place[1]
                raise SamplesMixError(f"the step decides by a value of the whole batch at {file}:{line}")
            if other.ended:
                waiting.append((other, flipped | {place}))
    return early


def follow_branches(run: Analysis, again: Again, program: Program) -> None:
    """See that wherever values of the model lead a whole batch behind its last unit, the last stage can go alone: it
    has the values, and the others do what they do in any case.

    Each decision is answered otherwise once, in a run of its own, those of ``run`` and those that such a run alone
    comes to; not what was seen to raise between units. There are `TRIES` runs at most, with the recorded one.

    Args:
        run: the recorded run.
        again: runs the step by other guesses.
        program: that was made of ``run``.

    Raises:
        NoScheduleError: a decision leads to layers, weights, values or gradients of other stages.
    """
    waiting, seen = [run.guesses], 1
    met = {run.asks[index] for index in run.guards}
    while waiting:
        guesses = waiting.pop(0)
        for place in guesses.decided:
            if place in met or seen == TRIES:
                continue
            seen += 1
            met.add(place)
            other = Guesses(guesses.with_other(place))
            try:
                found, result = again(other)
            except NoScheduleError:  # of what that answer leads to
                raise
            except _ENDS:  # a guard, or what made-up values led to
                continue
            waiting.append(other)
            _refuse_another_way(run, program, found, loss_in(result), place)


def _refuse_another_way(run: Analysis, program: Program, other: Analysis, loss: Tensor | None, place: Question) -> None:
    """Raises NoScheduleError where the run ``other`` asks for more of other stages than ``run`` has."""
    what = _another_call(run, other, loss is None) or _another_use(run, program, other)
    if what is None and loss is not None:  # else the step is skipped, with what it brought
        coming = {*chain.from_iterable(program.routes.keys_coming)}
        values = {key: returned_tensors(other.events[key[0]].result)[key[1]] for key in coming}
        if wanted_of(other, values, loss) != program.wanted & coming:
            what = "takes gradients to other values"
    if what is not None:
        file, line, _ = place[1]
        raise NoScheduleError(
            f"{file}:{line}: the step decides by a value of the model here, and {what} by one answer alone: the other "
            "stages of the pipeline, which don't have the value, can't know in time. Do it in any case and choose by "
            "torch.where, or use TensorParallelStrategy."
        )


def _another_call(run: Analysis, other: Analysis, skips: bool) -> str | None:
    """What ``other`` does up to the last unit that ``run`` does not; a step that ``skips`` may end before."""
    paths, others = ([path for path, _ in one.units] for one in (run, other))
    same = next((n for n, (a, b) in enumerate(zip(paths, others)) if a != b), min(len(paths), len(others)))
    if same < len(others) or same < len(paths) and not skips:
        return f"calls {(others[same:] or paths[same:])[0]!r}"
    end = min(run.tail, len(other.events)) if skips else run.tail
    if [x.func for x in run.events[:end]] != [x.func for x in other.events[:end]]:
        return "computes something else before the last layer"
    return None


def _another_use(run: Analysis, program: Program, other: Analysis) -> str | None:
    """What the last stage takes in ``other`` that it does not have by ``program``, which is made of ``run``."""
    same = _in_common(run, other)
    had = {*run.direct, *run.told, *run.overwritten}
    for name, index in (*other.direct, *other.told, *other.overwritten):
        if index >= run.tail and name in program.elsewhere and (index >= same or (name, index) not in had):
            return f"uses {name!r}"
    last = program.starts[-1]
    if not all(program.is_at_end(key, joined=False) for key, event in other.uses() if key[0] >= 0 and event >= last):
        return "uses other values of early layers"
    return None


def _in_common(run: Analysis, other: Analysis) -> int:
    """How many functions and units the runs call alike before they part."""
    pairs = zip(run.events, other.events)
    return next((n for n, (a, b) in enumerate(pairs) if a.func != b.func), min(len(run.events), len(other.events)))


def _leads_to(again: Again, guesses: Guesses, outline: Outline) -> bool:
    """Whether by these guesses the step does what ``outline`` says."""
    try:
        other, _ = again(guesses)
    except _ENDS:
        return False
    guesses.ended = True
    return _outline(other) == outline


def guards_between_units(run: Analysis, whole: Again) -> frozenset[int]:
    """The events of ``run`` that ask for a value of the model before its last unit has run, as the validation of a
    distribution's parameters does, where ``whole`` raises by any other answer than the one that ``run`` went by."""
    asked = {index: place for index, place in run.asks.items() if index < run.tail}
    if len({*asked.values()}) > TRIES:
        return frozenset()
    raising = {place: _always_raises(whole, Guesses(run.guesses.with_other(place)), place) for place in asked.values()}
    return frozenset(index for index, place in asked.items() if raising[place])


def _always_raises(whole: Again, guesses: Guesses, place: Question) -> bool:
    """Whether it raises by these guesses, whatever the answers to what is asked from ``place`` on."""
    waiting: list[tuple[Guesses, frozenset[Question]]] = [(guesses, frozenset({place}))]
    seen = 0
    while waiting:
        (guesses, flipped), seen = waiting.pop(), seen + 1
        if seen > TRIES or not _raises(whole, guesses, place):
            return False
        for later in guesses.decided_after(place):
            if later not in flipped:
                flipped |= {later}
                waiting.append((Guesses(guesses.with_other(later)), flipped))
    return True


def _raises(whole: Again, guesses: Guesses, place: Question) -> bool:
    """Whether the user's code raises by these guesses, at an answer to ``place`` that no microbatch goes by."""
    try:
        whole(guesses)
    except _ENDS as error:
        return _is_users(error) or _has_asked(error, place)
    return False


def _skips(again: Again, guesses: Guesses, outline: Outline) -> bool:
    """Whether a training step returns no loss by these guesses, and does nothing before that ``outline`` does not say:
    the whole batch's tail has no other values."""
    try:
        other, result = again(Guesses(guesses.patterns))
    except _ENDS:
        return False
    events, _, _, effects = _outline(other)
    return loss_in(result) is None and events == outline[0][: len(events)] and effects <= outline[3]


def _outline(run: Analysis) -> Outline:
    """All that a program is made of, and what is returned. Reading a number, as for a message, changes nothing."""
    kept = [index for index, event in enumerate(run.events) if event.kind != "read"]
    place = {index: n for n, index in enumerate(kept)}

    def moved(key: Key | None) -> Key | None:
        return key if key is None else (place.get(key[0], key[0]), key[1])

    events = [(run.events[i].func, run.events[i].kind, [*map(moved, run.events[i].inputs)]) for i in kept]
    constants = [(place[index], found) for index, found in run.constants if index in place]
    returned = [moved(run.values.keys.get(id(x))) for x in run.returned]
    return events, constants, returned, {moved(run.values.keys.get(id(x))) for x in run.effects}


def _raised_in(error: BaseException) -> TracebackType | None:
    """The frame in which it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _has_asked(error: BaseException, place: Question) -> bool:
    """Whether the function that asked the question has raised it, as torch's own checks of values do."""
    trace, (file, line, _) = _raised_in(error), place[1]
    code = None if trace is None else trace.tb_frame.f_code
    return code is not None and code.co_filename == file and line in {x[2] for x in code.co_lines()}


def _is_users(error: BaseException) -> bool:
    """Whether the user's code raised it, and not what it called for want of values."""
    trace = _raised_in(error)
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, AssertionError) or not f"{name}.".startswith(("torch.", "lightning_par."))


def refuse_another_loss(loss: Tensor | None, parts: Sequence[Tensor]) -> None:
    """Raises RuntimeError where the ``loss`` of a whole batch is not the sum of its microbatches' ``parts``.

    The whole batch led elsewhere behind the last unit than its microbatches were led, which have the gradients.
    """
    shares = torch.stack([full(x).double() for x in parts] or [torch.zeros(())])
    if loss is None:  # the step is skipped, with what its microbatches brought
        return
    if _differ(float(full(loss)), float(shares.sum()), 1e-2 * float(shares.abs().max())):
        raise RuntimeError(
            "By values of this batch the step computes another loss than for microbatches of it, which don't have "
            "them. Write microbatches=1."
        )


def _differ(one: float, other: float, allowed: float) -> bool:
    """Whether two losses are not the same number, or both none."""
    return not (abs(one - other) <= allowed or one == other or isnan(one) and isnan(other))
